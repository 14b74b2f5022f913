"""Where a drafter of blocks writes its context, and what its blocks read."""

from dataclasses import dataclass

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import find_owners


@dataclass(frozen=True)
class BlockInputs:
    """One block of Q tokens for each of R requests.

    Args:
        input_ids: [R * Q] int64, an anchor and then mask tokens.
        positions: [R * Q] int64, within the drafter's context.
        slot_mapping: [R * Q] int64; -1 for a token past the end of that context: it is
            computed at position 0, and its output means nothing.
        seq_lens: [R] int32, the context and what the block has of its own.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor


def find_context_slots(
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_size: int,
    max_len: int,
) -> torch.Tensor:
    """Return the slots of a step's tokens, without those that are no context.

    Args:
        block_rows: [max_num_reqs, max_blocks] int32, of the target.
        idx_mapping: [num_reqs] int32, batch_idx -> request row.
        query_start_loc: [num_reqs + 1] int32.
        positions: [num_tokens] int64.
        num_computed_tokens: [max_num_reqs] int32, after the step: rejected drafts stand
            at or behind it.
        block_size: tokens a cache block.
        max_len: positions that the drafter has.

    Returns:
        [num_tokens] int64; -1 for a token that is not to be written.

    Raises:
        IndexError: on the CPU, a request has no row, or a position no block.
    """
    impl = _find_context_slots_torch
    if positions.is_cuda:
        impl = _find_context_slots_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.find_context_slots
    return impl(
        block_rows,
        idx_mapping,
        query_start_loc,
        positions,
        num_computed_tokens,
        block_size,
        max_len,
    )


def lay_out_blocks(
    anchor_ids: torch.Tensor,
    anchor: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> BlockInputs:
    """Lay out an anchor and mask tokens behind the context of each request.

    Args:
        anchor_ids: [R] int64, the last known tokens.
        anchor: [R] int64, their positions.
        num_slots: Q.
        mask_token_id: what a block holds behind its anchor.
        block_table: [R, num_blocks] int32.
        block_size: tokens a cache block.
        max_len: positions that the drafter and the cache have.

    Raises:
        IndexError: on the CPU, a position has no block.
    """
    impl = _lay_out_blocks_torch
    if anchor.is_cuda:
        impl = _lay_out_blocks_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.lay_out_blocks
    return BlockInputs(
        *impl(
            anchor_ids,
            anchor,
            num_slots,
            mask_token_id,
            block_table,
            block_size,
            max_len,
        )
    )


def _find_context_slots_torch(
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_size: int,
    max_len: int,
) -> torch.Tensor:
    rows = idx_mapping[find_owners(query_start_loc[1:], len(positions))]
    is_context = positions < num_computed_tokens[rows].clamp(max=max_len)
    places = positions.masked_fill(~is_context, 0)
    slots = block_rows[rows, places // block_size].long() * block_size
    slots += places % block_size
    return slots.masked_fill_(~is_context, -1)


def _find_context_slots_triton(
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_size: int,
    max_len: int,
) -> torch.Tensor:
    slots = torch.empty_like(positions)
    _find_context_slots_kernel[(len(idx_mapping),)](
        block_rows,
        block_rows.stride(0),
        idx_mapping,
        query_start_loc,
        positions,
        num_computed_tokens,
        slots,
        block_size,
        max_len,
        BLOCK_SIZE=1024,
    )
    return slots


def _lay_out_blocks_torch(
    anchor_ids: torch.Tensor,
    anchor: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    positions = anchor.unsqueeze(1) + torch.arange(num_slots, device=anchor.device)
    has_place = positions < max_len
    places = positions.masked_fill(~has_place, 0)
    slots = block_table.gather(1, places // block_size).long() * block_size
    slots += places % block_size
    input_ids = torch.full_like(positions, mask_token_id)
    input_ids[:, 0] = anchor_ids
    return (
        input_ids.flatten(),
        places.flatten(),
        slots.masked_fill_(~has_place, -1).flatten(),
        (anchor + num_slots).clamp(max=max_len).to(torch.int32),
    )


def _lay_out_blocks_triton(
    anchor_ids: torch.Tensor,
    anchor: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_reqs, device = len(anchor), anchor.device
    num_tokens = num_reqs * num_slots
    outputs = (
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
    )
    _lay_out_blocks_kernel[(num_reqs,)](
        anchor_ids,
        anchor,
        block_table,
        block_table.stride(0),
        num_slots,
        mask_token_id,
        block_size,
        max_len,
        *outputs,
        BLOCK_SIZE=triton.next_power_of_2(num_slots),
    )
    return outputs


@triton.jit
def _find_context_slots_kernel(
    block_rows_ptr,  # [max_num_reqs, max_blocks]
    block_rows_stride,
    idx_mapping_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    positions_ptr,  # [num_tokens]
    num_computed_tokens_ptr,  # [max_num_reqs]
    slots_ptr,  # [num_tokens]
    block_size,
    max_len,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx)
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    num_computed = tl.load(num_computed_tokens_ptr + req_state_idx)
    context_len = tl.minimum(num_computed, max_len)
    row_ptr = block_rows_ptr + req_state_idx * block_rows_stride
    for first in range(start, end, BLOCK_SIZE):
        token_idx = first + tl.arange(0, BLOCK_SIZE)
        mask = token_idx < end
        position = tl.load(positions_ptr + token_idx, mask=mask, other=0)
        is_context = mask & (position < context_len)
        block_id = tl.load(row_ptr + position // block_size, mask=is_context, other=0)
        slot = block_id.to(tl.int64) * block_size + position % block_size
        tl.store(slots_ptr + token_idx, tl.where(is_context, slot, -1), mask=mask)


@triton.jit
def _lay_out_blocks_kernel(
    anchor_ids_ptr,  # [num_reqs]
    anchor_ptr,  # [num_reqs]
    block_table_ptr,  # [num_reqs, num_blocks]
    block_table_stride,
    num_slots,
    mask_token_id,
    block_size,
    max_len,
    input_ids_ptr,  # [num_reqs * num_slots]
    positions_ptr,  # [num_reqs * num_slots]
    slot_mapping_ptr,  # [num_reqs * num_slots]
    seq_lens_ptr,  # [num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    anchor = tl.load(anchor_ptr + batch_idx)
    seq_len = tl.minimum(anchor + num_slots, max_len)
    tl.store(seq_lens_ptr + batch_idx, seq_len.to(tl.int32))
    local = tl.arange(0, BLOCK_SIZE)
    mask = local < num_slots
    position = anchor + local
    has_place = mask & (position < max_len)
    place = tl.where(has_place, position, 0)
    block_row_ptr = block_table_ptr + batch_idx * block_table_stride
    block = tl.load(block_row_ptr + place // block_size, mask=has_place, other=0)
    slot = block.to(tl.int64) * block_size + place % block_size
    anchor_id = tl.load(anchor_ids_ptr + batch_idx)
    token_id = tl.where(local == 0, anchor_id, mask_token_id)
    token_idx = batch_idx * num_slots + local
    tl.store(input_ids_ptr + token_idx, token_id, mask=mask)
    tl.store(positions_ptr + token_idx, place, mask=mask)
    tl.store(slot_mapping_ptr + token_idx, tl.where(has_place, slot, -1), mask=mask)
