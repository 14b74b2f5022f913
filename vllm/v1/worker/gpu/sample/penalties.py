"""Presence, frequency and repetition penalties: what was said counts against a token.

The counts belong to committed tokens; drafts that stand before a row in the same step
are added for that row only.
"""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, to_device


class PenaltiesState:
    """The penalties of each request, and how often each token was said.

    A count is packed: bit 0 says that the token is in the prompt, the bits above hold
    its number of occurrences in the output.

    Args:
        max_num_reqs: rows.
        vocab_size: width of the logits.
        device: where the device arrays live.
    """

    def __init__(
        self, max_num_reqs: int, vocab_size: int, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        self.num_used = 0
        # [max_num_reqs] uint8 and float32
        self.is_used = UvaBackedTensor(max_num_reqs, torch.uint8, device)
        self.presence = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.frequency = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.repetition = UvaBackedTensor(max_num_reqs, torch.float32, device)
        shape = (max_num_reqs, vocab_size)
        # [max_num_reqs, vocab_size] int32. NumPy leaves the pages of zeros unmapped
        # until a request uses them, torch does not.
        self.token_counts = (
            torch.from_numpy(np.zeros(shape, dtype=np.int32))
            if device.type == "cpu"
            else torch.zeros(shape, dtype=torch.int32, device=device)
        )
        self._staged: dict[int, np.ndarray] = {}
        self._is_stale = False

    def add_request(
        self,
        req_state_idx: int,
        sampling_params: SamplingParams,
        prompt_token_ids: list[int],
        prefill_token_ids: list[int],
    ) -> None:
        """Fill the request's row; what lies beyond the prompt was its output before."""
        self.remove_request(req_state_idx)
        is_used = (
            sampling_params.presence_penalty != 0.0
            or sampling_params.frequency_penalty != 0.0
            or sampling_params.repetition_penalty != 1.0
        )
        if not is_used:
            return
        self.is_used_np[req_state_idx] = True
        self.num_used += 1
        self.is_used.np[req_state_idx] = 1
        self.presence.np[req_state_idx] = sampling_params.presence_penalty
        self.frequency.np[req_state_idx] = sampling_params.frequency_penalty
        self.repetition.np[req_state_idx] = sampling_params.repetition_penalty
        output = np.asarray(prefill_token_ids[len(prompt_token_ids) :], dtype=np.int64)
        counts = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        counts[prompt_token_ids] |= 1
        self._staged[req_state_idx] = counts
        self._is_stale = True

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        if self.is_used_np[req_state_idx]:
            self.is_used_np[req_state_idx] = False
            self.num_used -= 1
            self.is_used.np[req_state_idx] = 0
            self._staged.pop(req_state_idx, None)
            self._is_stale = True

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        if not self._is_stale:
            return
        self._is_stale = False
        for numbers in (self.is_used, self.presence, self.frequency, self.repetition):
            numbers.copy_to_device()
        for req_state_idx, counts in self._staged.items():
            self.token_counts[req_state_idx].copy_(
                to_device(counts, self.token_counts.device), non_blocking=True
            )
        self._staged.clear()


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: PenaltiesState,
    first_logit_idx: int = 0,
) -> None:
    """Lower the logits of tokens that were said before.

    The repetition penalty divides a positive logit and multiplies any other, once for
    each token of prompt or output. Then frequency x occurrences in the output and
    presence (once, if there is one) are subtracted.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        expanded_local_pos: [num_logits] int32, how many drafts of the request stand
            before the row in this step.
        positions: [num_logits] int64, absolute position of the token to sample.
        input_ids: of all rows of the step, int64, the token that the model read at the
            row; where the local position is above 0, the draft just before the token to
            sample.
        all_token_ids: [max_num_reqs, max_model_len] int32, committed tokens.
        state: counts and penalties.
        first_logit_idx: which row of the step row 0 of the other arrays is.

    Source: Keskar et al., arXiv:1909.05858 (repetition); the OpenAI API (the others).
    Twin: _apply_penalties_torch.
    """
    impl = _apply_penalties_triton if logits.is_cuda else _apply_penalties_sparse
    impl(
        logits,
        expanded_idx_mapping,
        expanded_local_pos,
        positions,
        input_ids,
        all_token_ids,
        state,
        first_logit_idx,
    )


def count_sampled_tokens(
    idx_mapping: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    state: PenaltiesState,
) -> None:
    """Add a step's committed tokens to the counts of the requests with penalties.

    Args:
        idx_mapping: [num_reqs] int32, batch_idx -> request state row.
        sampled_token_ids: [num_reqs, width] int64; a token below 0 is not counted.
        num_sampled: [num_reqs] int32, how many of a row are committed.
        state: counts, changed in place.
    """
    impl = (
        _count_sampled_tokens_triton
        if idx_mapping.is_cuda
        else _count_sampled_tokens_torch
    )
    impl(idx_mapping, sampled_token_ids, num_sampled, state)


def _apply_penalties_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: PenaltiesState,
    first_logit_idx: int = 0,
) -> None:
    """The meaning of the other two, over the whole vocabulary."""
    rows = expanded_idx_mapping
    counts = state.token_counts[rows]
    for distance in range(int(expanded_local_pos.max())):
        is_before = expanded_local_pos > distance
        draft = input_ids.roll(distance)[first_logit_idx:][: len(rows)].unsqueeze(1)
        counts.scatter_add_(1, draft, 2 * is_before.to(counts.dtype).unsqueeze(1))
    num_in_output = counts >> 1
    repetition = state.repetition.gpu[rows].unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(counts != 0, repeated, logits)
    penalised -= state.frequency.gpu[rows].unsqueeze(1) * num_in_output
    penalised -= state.presence.gpu[rows].unsqueeze(1) * (num_in_output > 0)
    is_used = state.is_used.gpu[rows].bool().unsqueeze(1)
    logits.copy_(torch.where(is_used, penalised, logits))


def _apply_penalties_sparse(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: PenaltiesState,
    first_logit_idx: int = 0,
) -> None:
    """Go over the tokens that were said instead of the vocabulary: the CPU path."""
    logit_idx = state.is_used.gpu[expanded_idx_mapping].nonzero().squeeze(-1)
    if logit_idx.numel() == 0:
        return
    # One pair for each row and token before it: the committed ones, then the drafts.
    num_before = positions[logit_idx]
    ends = num_before.cumsum(0)
    pair_row = find_owners(ends, int(ends[-1]))
    pair_place = torch.arange(len(pair_row)) - (ends - num_before)[pair_row]
    owner = logit_idx[pair_row]
    req_state_idx = expanded_idx_mapping[owner]
    token_id = all_token_ids[req_state_idx, pair_place].long()
    # How far before the row a token stands; 0 is the token that the row itself read.
    distance = num_before[pair_row] - 1 - pair_place
    is_draft = distance < expanded_local_pos[owner]
    draft_pairs = is_draft.nonzero().squeeze(-1)
    token_id[draft_pairs] = input_ids[
        first_logit_idx + owner[draft_pairs] - distance[draft_pairs]
    ]
    counts = state.token_counts[req_state_idx, token_id]
    for place in range(int(expanded_local_pos.max())):
        is_before = expanded_local_pos[owner] > place
        draft = input_ids[(first_logit_idx + owner - place).clamp_(min=0)]
        counts += 2 * (is_before & (draft == token_id)).to(counts.dtype)

    num_in_output = counts >> 1
    repetition = state.repetition.gpu[req_state_idx]
    seen = logits[owner, token_id]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= state.frequency.gpu[req_state_idx] * num_in_output
    seen -= state.presence.gpu[req_state_idx] * (num_in_output > 0)
    # A token that was said twice is written twice, with the same value.
    logits[owner, token_id] = seen


def _count_sampled_tokens_torch(
    idx_mapping: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    state: PenaltiesState,
) -> None:
    columns = torch.arange(sampled_token_ids.shape[1], device=idx_mapping.device)
    is_counted = (columns < num_sampled.unsqueeze(1)) & (sampled_token_ids >= 0)
    is_counted &= state.is_used.gpu[idx_mapping].bool().unsqueeze(1)
    place = idx_mapping.long().unsqueeze(1) * state.vocab_size + sampled_token_ids
    place = place[is_counted]
    state.token_counts.view(-1).scatter_add_(
        0, place, torch.full_like(place, 2, dtype=torch.int32)
    )


def _apply_penalties_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    all_token_ids: torch.Tensor,
    state: PenaltiesState,
    first_logit_idx: int = 0,
) -> None:
    num_logits, vocab_size = logits.shape
    block_size = 1024
    _penalties_kernel[(num_logits, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        expanded_local_pos,
        input_ids,
        first_logit_idx,
        state.token_counts,
        state.token_counts.stride(0),
        state.is_used.gpu,
        state.presence.gpu,
        state.frequency.gpu,
        state.repetition.gpu,
        vocab_size,
        BLOCK_SIZE=block_size,
    )


def _count_sampled_tokens_triton(
    idx_mapping: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    state: PenaltiesState,
) -> None:
    num_reqs, width = sampled_token_ids.shape
    _count_sampled_tokens_kernel[(num_reqs,)](
        idx_mapping,
        sampled_token_ids,
        sampled_token_ids.stride(0),
        num_sampled,
        state.token_counts,
        state.token_counts.stride(0),
        state.is_used.gpu,
        width,
        BLOCK_SIZE=triton.next_power_of_2(width),
    )


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    expanded_local_pos_ptr,  # [num_logits]
    input_ids_ptr,  # of the whole step
    first_logit_idx,
    token_counts_ptr,  # [max_num_reqs, vocab_size]
    token_counts_stride,
    is_used_ptr,  # [max_num_reqs]
    presence_ptr,  # [max_num_reqs]
    frequency_ptr,  # [max_num_reqs]
    repetition_ptr,  # [max_num_reqs]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row and block of the vocabulary.
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    if tl.load(is_used_ptr + req_state_idx) == 0:
        return
    presence = tl.load(presence_ptr + req_state_idx)
    frequency = tl.load(frequency_ptr + req_state_idx)
    repetition = tl.load(repetition_ptr + req_state_idx)
    token_id = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = token_id < vocab_size
    counts = tl.load(
        token_counts_ptr + req_state_idx * token_counts_stride + token_id,
        mask=mask,
        other=0,
    )
    for distance in range(tl.load(expanded_local_pos_ptr + logit_idx)):
        draft = tl.load(input_ids_ptr + first_logit_idx + logit_idx - distance)
        counts += 2 * (token_id == draft).to(tl.int32)
    num_in_output = counts >> 1
    row_ptr = logits_ptr + logit_idx * logits_stride
    logits = tl.load(row_ptr + token_id, mask=mask, other=0.0)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(counts != 0, repeated, logits)
    logits -= frequency * num_in_output.to(tl.float32)
    logits -= presence * (num_in_output > 0).to(tl.float32)
    tl.store(row_ptr + token_id, logits, mask=mask)


@triton.jit
def _count_sampled_tokens_kernel(
    idx_mapping_ptr,  # [num_reqs]
    sampled_token_ids_ptr,  # [num_reqs, width]
    sampled_token_ids_stride,
    num_sampled_ptr,  # [num_reqs]
    token_counts_ptr,  # [max_num_reqs, vocab_size]
    token_counts_stride,
    is_used_ptr,  # [max_num_reqs]
    width,
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    if tl.load(is_used_ptr + req_state_idx) == 0:
        return
    column = tl.arange(0, BLOCK_SIZE)
    mask = (column < width) & (column < tl.load(num_sampled_ptr + batch_idx))
    token_id = tl.load(
        sampled_token_ids_ptr + batch_idx * sampled_token_ids_stride + column,
        mask=mask,
        other=-1,
    )
    # Atomic: a token may be sampled twice in one step.
    tl.atomic_add(
        token_counts_ptr + req_state_idx * token_counts_stride + token_id,
        2,
        mask=token_id >= 0,
    )
