"""Where a drafter of blocks writes its context, and what its blocks read."""

from dataclasses import astuple, dataclass
from functools import cached_property

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import find_owners


@dataclass(frozen=True)
class BlockShape:
    """What blocks are made of.

    Args:
        num_slots: Q, tokens of a block.
        num_silent: of them, those in front that nothing is drafted from.
        max_drafts: that a request can have.
        mask_token_id: what a block holds behind its anchor.
        block_size: tokens a cache block.
        max_len: positions that the drafter and the cache have.
    """

    num_slots: int
    num_silent: int
    max_drafts: int
    mask_token_id: int
    block_size: int
    max_len: int

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """All of them, in order."""
        return astuple(self)


@dataclass(frozen=True)
class BlockInputs:
    """One block of Q tokens for each of R requests.

    Args:
        anchors: [R] int64, positions of the last known tokens.
        anchor_ids: [R] int64, these tokens.
        input_ids: [R * Q] int64, an anchor and then mask tokens.
        positions: [R * Q] int64, within the drafter's context.
        slot_mapping: [R * Q] int64; -1 for a token past the end of that context: it is
            computed at position 0, and its output means nothing.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, the context and what the block has of its own.
        num_drafts: [R] int32, that the context has room for.
        block_table: [R, num_blocks] int32.
    """

    anchors: torch.Tensor
    anchor_ids: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_drafts: torch.Tensor
    block_table: torch.Tensor


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
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_blocks: int,
    shape: BlockShape,
) -> BlockInputs:
    """Lay out an anchor and mask tokens behind the context of each request.

    Args:
        all_token_ids: [max_num_reqs, max_model_len] int32. A token past its end was not
            kept: the last one stands for it, and no draft follows.
        num_computed_tokens: [max_num_reqs] int32: the target has not computed the last
            known token, the anchor.
        block_rows: [max_num_reqs, max_blocks] int32, of the target.
        idx_mapping: [R] int32, of the requests.
        num_blocks: that the longest of them needs.
        shape: of the blocks.

    Raises:
        IndexError: on the CPU, a request has no row, or a position no block.
    """
    impl = _lay_out_blocks_torch
    if idx_mapping.is_cuda:
        impl = _lay_out_blocks_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.lay_out_blocks
    return BlockInputs(
        *impl(
            all_token_ids,
            num_computed_tokens,
            block_rows,
            idx_mapping,
            num_blocks,
            *shape.numbers,
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
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_blocks: int,
    num_slots: int,
    num_silent: int,
    max_drafts: int,
    mask_token_id: int,
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, ...]:
    device, num_reqs = idx_mapping.device, len(idx_mapping)
    anchor = num_computed_tokens[idx_mapping].long()
    last = all_token_ids.shape[1] - 1
    anchor_ids = all_token_ids[idx_mapping, anchor.clamp(max=last)].long()
    block_table = block_rows[:, :num_blocks].index_select(0, idx_mapping)
    positions = anchor.unsqueeze(1) + torch.arange(num_slots, device=device)
    has_place = positions < max_len
    places = positions.masked_fill(~has_place, 0)
    slots = block_table.gather(1, places // block_size).long() * block_size
    slots += places % block_size
    input_ids = torch.full_like(positions, mask_token_id)
    input_ids[:, 0] = anchor_ids
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * num_slots
    num_drafts = (max_len - num_silent - anchor).clamp(0, max_drafts)
    return (
        anchor,
        anchor_ids,
        input_ids.flatten(),
        places.flatten(),
        slots.masked_fill_(~has_place, -1).flatten(),
        starts,
        (anchor + num_slots).clamp(max=max_len).to(torch.int32),
        num_drafts.to(torch.int32),
        block_table,
    )


def _lay_out_blocks_triton(
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_blocks: int,
    num_slots: int,
    num_silent: int,
    max_drafts: int,
    mask_token_id: int,
    block_size: int,
    max_len: int,
) -> tuple[torch.Tensor, ...]:
    device, num_reqs = idx_mapping.device, len(idx_mapping)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    num_tokens = num_reqs * num_slots
    outputs = (
        empty(torch.int64, num_reqs),
        empty(torch.int64, num_reqs),
        empty(torch.int64, num_tokens),
        empty(torch.int64, num_tokens),
        empty(torch.int64, num_tokens),
        empty(torch.int32, num_reqs + 1),
        empty(torch.int32, num_reqs),
        empty(torch.int32, num_reqs),
        empty(torch.int32, num_reqs, num_blocks),
    )
    _lay_out_blocks_kernel[(num_reqs,)](
        all_token_ids,
        all_token_ids.shape[1],
        num_computed_tokens,
        block_rows,
        block_rows.stride(0),
        idx_mapping,
        num_blocks,
        num_slots,
        num_silent,
        max_drafts,
        mask_token_id,
        block_size,
        max_len,
        *outputs,
        BLOCK_SIZE=triton.next_power_of_2(num_slots),
        TABLE_BLOCK_SIZE=256,
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
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    max_model_len,
    num_computed_tokens_ptr,  # [max_num_reqs]
    block_rows_ptr,  # [max_num_reqs, max_blocks]
    block_rows_stride,
    idx_mapping_ptr,  # [num_reqs]
    num_blocks,
    num_slots,
    num_silent,
    max_drafts,
    mask_token_id,
    block_size,
    max_len,
    anchors_ptr,  # [num_reqs]
    anchor_ids_ptr,  # [num_reqs]
    input_ids_ptr,  # [num_reqs * num_slots]
    positions_ptr,  # [num_reqs * num_slots]
    slot_mapping_ptr,  # [num_reqs * num_slots]
    query_start_loc_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    num_drafts_ptr,  # [num_reqs]
    block_table_ptr,  # [num_reqs, num_blocks]
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    anchor = tl.load(num_computed_tokens_ptr + req_state_idx).to(tl.int64)
    kept = tl.minimum(anchor, max_model_len - 1)
    anchor_id = tl.load(all_token_ids_ptr + req_state_idx * max_model_len + kept)
    anchor_id = anchor_id.to(tl.int64)
    tl.store(anchors_ptr + batch_idx, anchor)
    tl.store(anchor_ids_ptr + batch_idx, anchor_id)
    seq_len = tl.minimum(anchor + num_slots, max_len)
    tl.store(seq_lens_ptr + batch_idx, seq_len.to(tl.int32))
    room = tl.maximum(max_len - num_silent - anchor, 0)
    num_drafts = tl.minimum(room, max_drafts)
    tl.store(num_drafts_ptr + batch_idx, num_drafts.to(tl.int32))
    end = ((batch_idx + 1) * num_slots).to(tl.int32)
    tl.store(query_start_loc_ptr + batch_idx + 1, end)
    if batch_idx == 0:
        tl.store(query_start_loc_ptr, 0)
    block_row_ptr = block_rows_ptr + req_state_idx * block_rows_stride
    for first in range(0, num_blocks, TABLE_BLOCK_SIZE):
        column = first + tl.arange(0, TABLE_BLOCK_SIZE)
        in_table = column < num_blocks
        block_ids = tl.load(block_row_ptr + column, mask=in_table, other=0)
        table_ptr = block_table_ptr + batch_idx * num_blocks + column
        tl.store(table_ptr, block_ids, mask=in_table)
    local = tl.arange(0, BLOCK_SIZE)
    mask = local < num_slots
    position = anchor + local
    has_place = mask & (position < max_len)
    place = tl.where(has_place, position, 0)
    block = tl.load(block_row_ptr + place // block_size, mask=has_place, other=0)
    slot = block.to(tl.int64) * block_size + place % block_size
    token_id = tl.where(local == 0, anchor_id, mask_token_id)
    token_idx = batch_idx * num_slots + local
    tl.store(input_ids_ptr + token_idx, token_id, mask=mask)
    tl.store(positions_ptr + token_idx, place, mask=mask)
    tl.store(slot_mapping_ptr + token_idx, tl.where(has_place, slot, -1), mask=mask)
