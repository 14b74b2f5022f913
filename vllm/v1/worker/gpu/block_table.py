"""Which cache blocks each request's tokens live in."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

# Written nowhere: a padding token's slot.
PAD_SLOT_ID = -1


class BlockTable:
    """One row of block ids a request.

    Args:
        max_num_reqs: rows.
        max_model_len: tokens that a row must be able to hold.
        block_size: tokens a block.
        device: where the table lives.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        max_num_blocks = triton.cdiv(max_model_len, block_size)
        self._rows = StagedWriteTensor(
            (max_num_reqs, max_num_blocks), torch.int32, device
        )
        self._num_blocks = [0] * max_num_reqs

    @property
    def rows(self) -> torch.Tensor:
        """[max_num_reqs, max_num_blocks] int32, by req_state_idx."""
        return self._rows.gpu

    def set_block_ids(self, req_state_idx: int, block_ids: list[int]) -> None:
        """Start a row with these blocks."""
        self._num_blocks[req_state_idx] = 0
        self.append_block_ids(req_state_idx, block_ids)

    def append_block_ids(self, req_state_idx: int, block_ids: list[int]) -> None:
        """Add blocks at the end of a row."""
        if not block_ids:
            return
        start = self._num_blocks[req_state_idx]
        self._rows.stage_write(req_state_idx, start, block_ids)
        self._num_blocks[req_state_idx] = start + len(block_ids)

    def apply_staged_writes(self) -> None:
        """Make what was added visible to the device."""
        self._rows.apply_write()

    def count_blocks(self, max_seq_len: int) -> int:
        """Return how many `max_seq_len` tokens need, but no more than a row holds."""
        needed = triton.cdiv(max_seq_len, self.block_size)
        return min(needed, self.rows.shape[1])

    def gather(self, idx_mapping: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """Return the rows of a batch, cut to what `max_seq_len` tokens need.

        Args:
            idx_mapping: [num_reqs] int32.
            max_seq_len: a bound: more than a row can hold is a whole row.

        Returns:
            [num_reqs, ceil(max_seq_len / block_size)] int32, contiguous.
        """
        num_columns = self.count_blocks(max_seq_len)
        native = ops.maybe_step_ops()
        if native is not None and not idx_mapping.is_cuda:
            return native.gather_rows(self.rows, idx_mapping, num_columns)
        return self.rows[:, :num_columns].index_select(0, idx_mapping)


def compute_slot_mapping(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return the cache slot of every token of a step.

    Args:
        block_table: [num_reqs, num_blocks] int32, in batch order.
        query_start_loc: [num_reqs + 1] int32.
        positions: [num_tokens] int64.
        block_size: tokens a block.

    Returns:
        [num_tokens] int64: block id * block_size + offset.
    """
    impl = _compute_slot_mapping_torch
    if positions.is_cuda:
        impl = _compute_slot_mapping_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.compute_slot_mapping
    return impl(block_table, query_start_loc, positions, block_size)


def _compute_slot_mapping_torch(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    batch_idx = find_owners(query_start_loc[1:], len(positions))
    block_ids = block_table[batch_idx, positions // block_size].to(torch.int64)
    return block_ids * block_size + positions % block_size


def _compute_slot_mapping_triton(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    slot_mapping = torch.empty_like(positions)
    _compute_slot_mapping_kernel[(block_table.shape[0],)](
        block_table,
        block_table.stride(0),
        query_start_loc,
        positions,
        slot_mapping,
        block_size,
        BLOCK_SIZE=1024,
    )
    return slot_mapping


@triton.jit
def _compute_slot_mapping_kernel(
    block_table_ptr,  # [num_reqs, num_blocks]
    block_table_stride,
    query_start_loc_ptr,  # [num_reqs + 1]
    positions_ptr,  # [num_tokens]
    slot_mapping_ptr,  # [num_tokens]
    block_size,
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx)
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    row_ptr = block_table_ptr + batch_idx * block_table_stride
    for first in range(start, end, BLOCK_SIZE):
        token_idx = first + tl.arange(0, BLOCK_SIZE)
        mask = token_idx < end
        position = tl.load(positions_ptr + token_idx, mask=mask, other=0)
        block_id = tl.load(row_ptr + position // block_size, mask=mask, other=0)
        slot = block_id.to(tl.int64) * block_size + position % block_size
        tl.store(slot_mapping_ptr + token_idx, slot, mask=mask)
