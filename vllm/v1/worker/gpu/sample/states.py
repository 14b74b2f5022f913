"""The sampling parameters that are one number a request, as persistent rows."""

import secrets

import numpy as np
import torch

from vllm._custom_ops import MAX_LISTED
from vllm.sampling_params import SamplingParams
from vllm.utils.seeds import request_seed
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.ragged import RaggedRows
from vllm.v1.worker.gpu.sample.uses import Uses

# num_logprobs of a request that wants none.
NO_LOGPROBS = -1


class SamplingStates:
    """Temperature, filters, seed and wanted log-probabilities of each request.

    Args:
        max_num_reqs: rows.
        vocab_size: width of the logits.
        device: where the device arrays live.
        seed: from which requests without a seed get theirs; None draws one.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        seed: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        # [max_num_reqs] each; the neutral values are those of a greedy request.
        self.temperature = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.top_k = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.top_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.min_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.seeds = UvaBackedTensor(max_num_reqs, torch.int64, device)
        # [max_num_reqs] bool: the request named its seed, so its drafts are verified by
        # coupled sampling.
        self.is_seeded = UvaBackedTensor(max_num_reqs, torch.bool, device)
        # [max_num_reqs] bool: a grammar decides with the model.
        self.is_constrained = UvaBackedTensor(max_num_reqs, torch.bool, device)
        self.top_p.np[:] = 1.0
        self.num_logprobs_np = np.full(max_num_reqs, NO_LOGPROBS, dtype=np.int32)
        # Candidates that a request named itself.
        self.chosen_token_ids = RaggedRows(max_num_reqs, (torch.int32,), device)
        self._engine_seed = secrets.randbits(63) if seed is None else seed
        self._is_stale = True

    def add_request(
        self, req_state_idx: int, req_id: str, sampling_params: SamplingParams
    ) -> None:
        """Fill the request's row."""
        self.temperature.np[req_state_idx] = sampling_params.temperature
        top_k = sampling_params.top_k
        # Keeping the whole vocabulary is keeping all.
        self.top_k.np[req_state_idx] = top_k if 0 < top_k < self.vocab_size else 0
        self.top_p.np[req_state_idx] = sampling_params.top_p
        self.min_p.np[req_state_idx] = sampling_params.min_p
        seed = sampling_params.seed
        self.seeds.np[req_state_idx] = (
            request_seed(self._engine_seed, req_id) if seed is None else seed
        )
        self.is_seeded.np[req_state_idx] = seed is not None
        self.is_constrained.np[req_state_idx] = (
            sampling_params.structured_outputs is not None
        )
        self._add_logprobs(req_state_idx, sampling_params)
        self._is_stale = True

    def _add_logprobs(
        self, req_state_idx: int, sampling_params: SamplingParams
    ) -> None:
        num_logprobs = sampling_params.num_logprobs
        if num_logprobs is None:
            num_logprobs = NO_LOGPROBS
        elif num_logprobs < 0:
            num_logprobs = self.vocab_size
        self.num_logprobs_np[req_state_idx] = num_logprobs
        self.chosen_token_ids.clear_row(req_state_idx)
        if sampling_params.logprob_token_ids:
            self.chosen_token_ids.set_row(
                req_state_idx,
                np.asarray(sampling_params.logprob_token_ids, dtype=np.int32),
            )

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.num_logprobs_np[req_state_idx] = NO_LOGPROBS
        self.chosen_token_ids.clear_row(req_state_idx)

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self.chosen_token_ids.apply_staged_writes()
        if not self._is_stale:
            return
        self._is_stale = False
        for numbers in (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seeds,
            self.is_seeded,
            self.is_constrained,
        ):
            numbers.copy_to_device()

    def is_all_greedy(self, idx_mapping_np: np.ndarray) -> bool:
        """Whether none of the requests needs noise."""
        return not any(self.temperature.np[idx_mapping_np].tolist())

    def uses_standard_verification(self, idx_mapping_np: np.ndarray) -> bool:
        """Whether a draft may be judged by more than equality with the target's."""
        temperature = self.temperature.np[idx_mapping_np]
        return bool(np.any((temperature != 0.0) & ~self.is_seeded.np[idx_mapping_np]))

    def find_uses(self, req_state_idx: int) -> int:
        """Return the bits of `Uses` that the numbers of a request ask for."""
        temperature = self.temperature.np[req_state_idx]
        is_filtered = (
            self.top_k.np[req_state_idx] > 0 or self.top_p.np[req_state_idx] < 1.0
        )
        num_logprobs = self.num_logprobs_np[req_state_idx]
        has_unlisted = num_logprobs > min(
            MAX_LISTED, self.vocab_size
        ) or self.chosen_token_ids.has_list(req_state_idx)
        uses = 0
        for bit, is_used in (
            (Uses.NOISE, temperature != 0.0),
            (Uses.TEMPERATURE, temperature not in (0.0, 1.0)),
            (Uses.MIN_P, self.min_p.np[req_state_idx] != 0.0),
            (Uses.TOP_K_TOP_P, is_filtered),
            (Uses.LOGPROBS, num_logprobs != NO_LOGPROBS),
            (Uses.LOGPROBS_OF_WHOLE_ROWS, has_unlisted),
        ):
            uses |= bit if is_used else 0
        return uses
