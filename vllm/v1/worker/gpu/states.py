"""Persistent rows of the requests: tokens and lengths, on the device."""

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor


class RequestState:
    """Rows that never move: a request takes one when it starts and keeps it.

    Args:
        max_num_reqs: rows.
        max_model_len: tokens of a row.
        num_speculative_tokens: drafts of a row.
        device: where the arrays live.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.req_id_to_index: dict[str, int] = {}
        # Grows whenever a row gets or loses its request.
        self.version = 0
        self._free_indices = list(range(max_num_reqs - 1, -1, -1))

        # Prompt, then sampled tokens; written by the host at the start and by the
        # device after each step.
        self.all_token_ids = StagedWriteTensor(
            (max_num_reqs, max_model_len), torch.int32, device
        )
        # Known tokens: device truth. The next sampled token goes to this position.
        self.total_len = StagedWriteTensor(max_num_reqs, torch.int32, device)
        # Tokens whose KV is in the cache: device truth.
        self.num_computed_tokens = StagedWriteTensor(max_num_reqs, torch.int32, device)
        # Of the last proposal: what the next step verifies behind the known tokens.
        self.draft_tokens = torch.zeros(
            (max_num_reqs, num_speculative_tokens), dtype=torch.int64, device=device
        )
        # Tokens that were known when the row was filled; a step that reaches the last
        # of them samples.
        self.prefill_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.prompt_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        # [max_num_reqs] drafts that the request itself allows in one step.
        self.max_num_drafts_np = np.zeros(max_num_reqs, dtype=np.int32)
        self._num_speculative_tokens = num_speculative_tokens

    @property
    def num_reqs(self) -> int:
        """Rows in use."""
        return len(self.req_id_to_index)

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        prefill_token_ids: list[int],
        num_computed_tokens: int,
        max_num_drafts: int | None = None,
    ) -> int:
        """Give a request a row and fill it.

        Args:
            max_num_drafts: that the request allows in one step; None for any number.

        Returns:
            req_state_idx: the row.
        """
        assert req_id not in self.req_id_to_index, f"{req_id} has a row already"
        assert self._free_indices, "more requests than rows"
        req_state_idx = self._free_indices.pop()
        self.req_id_to_index[req_id] = req_state_idx
        self.version += 1
        self.all_token_ids.stage_write(
            req_state_idx, 0, np.asarray(prefill_token_ids, dtype=np.int32)
        )
        self.total_len.stage_write(req_state_idx, 0, len(prefill_token_ids))
        self.num_computed_tokens.stage_write(req_state_idx, 0, num_computed_tokens)
        self.prefill_len.np[req_state_idx] = len(prefill_token_ids)
        self.prompt_len.np[req_state_idx] = prompt_len
        limit = self._num_speculative_tokens
        self.max_num_drafts_np[req_state_idx] = (
            limit if max_num_drafts is None else min(max_num_drafts, limit)
        )
        return req_state_idx

    def remove_request(self, req_id: str) -> int | None:
        """Free the request's row and return it; None if it has none."""
        req_state_idx = self.req_id_to_index.pop(req_id, None)
        if req_state_idx is not None:
            self._free_indices.append(req_state_idx)
            self.version += 1
        return req_state_idx

    def keep_drafts(self, idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take a proposal for what the next step verifies.

        Args:
            idx_mapping: [num_reqs] int32.
            token_ids: [num_reqs, num_speculative_tokens] int64, of these rows.
        """
        scatter = _scatter_rows_torch
        native = ops.maybe_step_ops()
        if native is not None and not idx_mapping.is_cuda:
            scatter = native.scatter_rows
        scatter(token_ids, idx_mapping, self.draft_tokens)

    def apply_staged_writes(self) -> None:
        """Make what was added visible to the device."""
        self.all_token_ids.apply_write()
        self.total_len.apply_write()
        self.num_computed_tokens.apply_write()
        self.prefill_len.copy_to_device()
        self.prompt_len.copy_to_device()


def _scatter_rows_torch(
    values: torch.Tensor, idx_mapping: torch.Tensor, rows: torch.Tensor
) -> None:
    rows.index_copy_(0, idx_mapping.long(), values)
