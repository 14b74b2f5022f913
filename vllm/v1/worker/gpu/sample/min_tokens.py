"""min_tokens: no stop token before the output is long enough."""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.ragged import RaggedRows


class MinTokensState:
    """The stop tokens of requests with min_tokens, and until where they are masked.

    A row is judged by the position of its token alone, so drafts that were accepted
    earlier in the step count, and preemption changes nothing.

    Args:
        max_num_reqs: rows.
        device: where the device arrays live.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        self.stop_token_ids = RaggedRows(max_num_reqs, (torch.int32,), device)
        # [max_num_reqs] int64: the first position at which a stop token may stand.
        self.min_stop_position = UvaBackedTensor(max_num_reqs, torch.int64, device)
        self._is_stale = False

    def add_request(
        self, req_state_idx: int, sampling_params: SamplingParams, prompt_len: int
    ) -> None:
        """Fill the request's row."""
        self.stop_token_ids.clear_row(req_state_idx)
        stop_token_ids = sampling_params.all_stop_token_ids
        is_used = sampling_params.min_tokens > 0 and bool(stop_token_ids)
        self.is_used_np[req_state_idx] = is_used
        if is_used:
            self.stop_token_ids.set_row(
                req_state_idx, np.asarray(stop_token_ids, dtype=np.int32)
            )
            self.min_stop_position.np[req_state_idx] = (
                prompt_len + sampling_params.min_tokens
            )
            self._is_stale = True

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.is_used_np[req_state_idx] = False
        self.stop_token_ids.clear_row(req_state_idx)

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self.stop_token_ids.apply_staged_writes()
        if self._is_stale:
            self.min_stop_position.copy_to_device()
            self._is_stale = False


def apply_min_tokens(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    stop_token_ids: RaggedRows,
    min_stop_position: torch.Tensor,
) -> None:
    """Set the logits of stop tokens to -inf where the output is still too short.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        positions: [num_logits] int64, absolute position of the token to sample.
        stop_token_ids: of the requests with min_tokens.
        min_stop_position: [max_num_reqs] int64, prompt length + min_tokens.
    """
    impl = _apply_min_tokens_triton if logits.is_cuda else _apply_min_tokens_torch
    impl(logits, expanded_idx_mapping, positions, stop_token_ids, min_stop_position)


def _apply_min_tokens_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    stop_token_ids: RaggedRows,
    min_stop_position: torch.Tensor,
) -> None:
    (token_ids,) = stop_token_ids.values
    logit_idx, value_idx = stop_token_ids.expand(expanded_idx_mapping)
    is_short = positions < min_stop_position[expanded_idx_mapping]
    is_masked = is_short[logit_idx]
    logits[logit_idx[is_masked], token_ids[value_idx[is_masked]]] = float("-inf")


def _apply_min_tokens_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    stop_token_ids: RaggedRows,
    min_stop_position: torch.Tensor,
) -> None:
    (token_ids,) = stop_token_ids.values
    _min_tokens_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        positions,
        stop_token_ids.starts.gpu,
        stop_token_ids.lengths.gpu,
        token_ids,
        min_stop_position,
        BLOCK_SIZE=64,
    )


@triton.jit
def _min_tokens_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    positions_ptr,  # [num_logits]
    starts_ptr,  # [max_num_reqs]
    lengths_ptr,  # [max_num_reqs]
    token_ids_ptr,  # [sum of lengths]
    min_stop_position_ptr,  # [max_num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    position = tl.load(positions_ptr + logit_idx)
    if position >= tl.load(min_stop_position_ptr + req_state_idx):
        return
    list_start = tl.load(starts_ptr + req_state_idx)
    length = tl.load(lengths_ptr + req_state_idx)
    row_ptr = logits_ptr + logit_idx * logits_stride
    for first in range(0, length, BLOCK_SIZE):
        offsets = first + tl.arange(0, BLOCK_SIZE)
        mask = offsets < length
        token_id = tl.load(token_ids_ptr + list_start + offsets, mask=mask, other=0)
        tl.store(row_ptr + token_id, float("-inf"), mask=mask)
