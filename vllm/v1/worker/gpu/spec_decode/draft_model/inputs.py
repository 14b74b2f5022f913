"""What a draft model reads: the tokens of the target's step, then its own drafts."""

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.block_table import PAD_SLOT_ID

# Requests of one program.
_DRAFT_BLOCK_SIZE = 64


@dataclass(frozen=True)
class DraftInputs:
    """One forward pass of the drafter.

    Args:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64, within the drafter's context.
        slot_mapping: [num_tokens] int64; -1 for a token that is not known or has no
            place: nothing is written, and nobody reads its output.
        seq_lens: [num_reqs] int32.
        last_token_idx: [num_reqs] int64, token row of the last known token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    last_token_idx: torch.Tensor


def gather_committed_inputs(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    first_position: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
    num_tokens: int,
) -> DraftInputs:
    """Lay out the known tokens from where the target's step began.

    A request's place ends where its longest possible output would: how many of its
    tokens are known is device truth.

    Args:
        all_token_ids: [max_num_reqs, max_model_len] int32.
        total_len: [max_num_reqs] int32, known tokens, those of this step included.
        idx_mapping: [num_reqs] int32.
        first_position: [num_reqs] int64, of the first token of the step.
        query_start_loc: [num_reqs + 1] int32, of these inputs.
        block_table: [num_reqs, num_blocks] int32, in batch order.
        block_size: tokens a block.
        max_len: positions that the drafter and the cache have.
        num_tokens: query_start_loc[-1], known to the host.
    """
    impl = _gather_committed_inputs_torch
    if idx_mapping.is_cuda:
        impl = _gather_committed_inputs_triton
    return impl(
        all_token_ids,
        total_len,
        idx_mapping,
        first_position,
        query_start_loc,
        block_table,
        block_size,
        max_len,
        num_tokens,
    )


def _gather_committed_inputs_torch(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    first_position: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
    num_tokens: int,
) -> DraftInputs:
    device = idx_mapping.device
    num_known = total_len[idx_mapping].long()
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    batch_idx = find_owners(query_start_loc[1:], num_tokens)
    local = torch.arange(num_tokens, device=device) - query_start_loc[batch_idx]
    position = first_position[batch_idx] + local
    is_known = position < num_known[batch_idx].clamp(max=max_len)
    place = torch.where(is_known, position, 0)
    tokens = all_token_ids[idx_mapping.long()[batch_idx], place].long()
    slots = block_table[batch_idx, place // block_size].long() * block_size
    slots += place % block_size
    last = (num_known.clamp(max=max_len) - 1 - first_position).clamp(min=0)
    # Of a prompt that goes on in the next step, more is known than is computed here.
    last = torch.minimum(last, query_lens - 1)
    return DraftInputs(
        tokens.masked_fill(~is_known, 0),
        place,
        slots.masked_fill(~is_known, PAD_SLOT_ID),
        (first_position + query_lens).to(torch.int32),
        query_start_loc[:-1] + last,
    )


def _gather_committed_inputs_triton(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    first_position: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
    num_tokens: int,
) -> DraftInputs:
    device, num_reqs = idx_mapping.device, len(idx_mapping)
    inputs = DraftInputs(
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int64, device=device),
    )
    _gather_committed_inputs_kernel[(num_reqs,)](
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        idx_mapping,
        first_position,
        query_start_loc,
        block_table,
        block_table.stride(0),
        block_size,
        max_len,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        inputs.last_token_idx,
        BLOCK_SIZE=256,
    )
    return inputs


def gather_draft_inputs(
    draft_token_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> DraftInputs:
    """Lay out one draft a request.

    Args:
        draft_token_ids: [num_reqs] int64.
        positions: [num_reqs] int64, of the drafts.
        block_table: [num_reqs, num_blocks] int32.
        block_size: tokens a block.
        max_len: positions that the drafter and the cache have; a draft beyond them is
            computed at position 0, and its output means nothing.

    Twin: _gather_draft_inputs_torch.
    """
    impl = _gather_draft_inputs_torch
    if positions.is_cuda:
        impl = _gather_draft_inputs_triton
    return impl(draft_token_ids, positions, block_table, block_size, max_len)


def _gather_draft_inputs_torch(
    draft_token_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> DraftInputs:
    has_place = positions < max_len
    place = torch.where(has_place, positions, 0)
    slots = block_table.gather(1, (place // block_size).unsqueeze(1)).squeeze(1)
    slots = slots.long() * block_size + place % block_size
    return DraftInputs(
        draft_token_ids,
        place,
        slots.masked_fill(~has_place, PAD_SLOT_ID),
        (place + 1).to(torch.int32),
        torch.arange(len(positions), device=positions.device),
    )


def _gather_draft_inputs_triton(
    draft_token_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> DraftInputs:
    num_reqs, device = len(positions), positions.device
    inputs = DraftInputs(
        draft_token_ids,
        torch.empty_like(positions),
        torch.empty_like(positions),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.arange(num_reqs, device=device),
    )
    programs = triton.cdiv(num_reqs, _DRAFT_BLOCK_SIZE)
    _gather_draft_inputs_kernel[(programs,)](
        positions,
        block_table,
        block_table.stride(0),
        block_size,
        max_len,
        num_reqs,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        BLOCK_SIZE=_DRAFT_BLOCK_SIZE,
    )
    return inputs


@triton.jit
def _gather_committed_inputs_kernel(
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    total_len_ptr,  # [max_num_reqs]
    idx_mapping_ptr,  # [num_reqs]
    first_position_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    block_table_ptr,  # [num_reqs, num_blocks]
    block_table_stride,
    block_size,
    max_len,
    input_ids_ptr,  # [num_tokens]
    positions_ptr,  # [num_tokens]
    slot_mapping_ptr,  # [num_tokens]
    seq_lens_ptr,  # [num_reqs]
    last_token_idx_ptr,  # [num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx).to(tl.int64)
    end = tl.load(query_start_loc_ptr + batch_idx + 1).to(tl.int64)
    first_position = tl.load(first_position_ptr + batch_idx)
    num_known = tl.load(total_len_ptr + req_state_idx).to(tl.int64)
    num_known = tl.minimum(num_known, max_len)
    tl.store(seq_lens_ptr + batch_idx, (first_position + end - start).to(tl.int32))
    last = tl.maximum(num_known - 1 - first_position, 0)
    # Of a prompt that goes on in the next step, more is known than is computed here.
    last = tl.minimum(last, end - start - 1)
    tl.store(last_token_idx_ptr + batch_idx, start + last)
    row_ptr = all_token_ids_ptr + req_state_idx * all_token_ids_stride
    block_row_ptr = block_table_ptr + batch_idx * block_table_stride
    for first in range(start, end, BLOCK_SIZE):
        token_idx = first + tl.arange(0, BLOCK_SIZE)
        mask = token_idx < end
        position = first_position + token_idx - start
        is_known = mask & (position < num_known)
        place = tl.where(is_known, position, 0)
        token = tl.load(row_ptr + place, mask=is_known, other=0)
        block = tl.load(block_row_ptr + place // block_size, mask=is_known, other=0)
        slot = block.to(tl.int64) * block_size + place % block_size
        tl.store(input_ids_ptr + token_idx, token.to(tl.int64), mask=mask)
        tl.store(positions_ptr + token_idx, place, mask=mask)
        tl.store(slot_mapping_ptr + token_idx, tl.where(is_known, slot, -1), mask=mask)


@triton.jit
def _gather_draft_inputs_kernel(
    draft_positions_ptr,  # [num_reqs]
    block_table_ptr,  # [num_reqs, num_blocks]
    block_table_stride,
    block_size,
    max_len,
    num_reqs,
    positions_ptr,  # [num_reqs]
    slot_mapping_ptr,  # [num_reqs]
    seq_lens_ptr,  # [num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = batch_idx < num_reqs
    position = tl.load(draft_positions_ptr + batch_idx, mask=mask, other=0)
    has_place = mask & (position < max_len)
    place = tl.where(has_place, position, 0)
    block_ptr = block_table_ptr + batch_idx * block_table_stride + place // block_size
    block = tl.load(block_ptr, mask=has_place, other=0)
    slot = block.to(tl.int64) * block_size + place % block_size
    tl.store(positions_ptr + batch_idx, place, mask=mask)
    tl.store(slot_mapping_ptr + batch_idx, tl.where(has_place, slot, -1), mask=mask)
    tl.store(seq_lens_ptr + batch_idx, (place + 1).to(tl.int32), mask=mask)
