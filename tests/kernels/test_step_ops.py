"""What the operators on the numbers of a step refuse: nothing is read out of an array.

What they compute is tested beside their twins, in tests/v1/worker/gpu.
"""

import pytest
import torch

from tests.kernels.implementations import native_ops
from vllm._cpu_ops_native import NativeOps
from vllm._cpu_ops_rows import FusedRows, LaidOutRows, RequestRows, RowLayout


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


TOKENS = torch.zeros((2, 8), dtype=torch.int32)
DRAFTS = torch.zeros((2, 3), dtype=torch.int64)
BLOCKS = int32(3, 5, 4, 6).view(2, 2)


def lay_out(
    ops: NativeOps,
    row: int = 0,
    total_len: int = 4,
    bounds: tuple[int, ...] = (0, 2),
    cu_num_logits: tuple[int, ...] = (0, 1),
    **totals: int,
) -> LaidOutRows:
    """Return the rows of one of two requests, which has computed three tokens."""
    lens = int32(total_len, 4)
    rows = RequestRows(TOKENS, lens, DRAFTS, int32(3, 3), BLOCKS, 4)
    sizes = {"num_tokens": bounds[-1], "num_logits": cu_num_logits[-1]} | totals
    layout = RowLayout(
        int32(row),
        query_start_loc=int32(*bounds),
        cu_num_logits=int32(*cu_num_logits),
        **sizes,
    )
    return FusedRows(ops, rows).lay_out(layout)


@native_ops
@pytest.mark.parametrize(
    "layout",
    [
        {"row": 2},
        {"row": -1},
        {"total_len": 20, "bounds": (0, 9)},
        {"bounds": (0, 1), "num_tokens": 2},
        {"cu_num_logits": (0, 3)},
        {"cu_num_logits": (0, 1), "num_logits": 2},
        {"cu_num_logits": (1, 2)},
    ],
)
def test_inputs_outside_the_request_rows_are_refused(ops, layout):
    with pytest.raises(IndexError, match="outside its request's"):
        lay_out(ops, **layout).prepare(2)


@native_ops
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_inputs_outside_the_blocks_are_refused(ops, num_blocks):
    # Positions 3 and 4, in blocks of four: two blocks, and a row has no more.
    assert lay_out(ops).prepare(2)[2].tolist() == [3 * 4 + 3, 5 * 4]
    with pytest.raises(IndexError, match="outside its request's"):
        lay_out(ops).prepare(num_blocks)


@native_ops
def test_arrays_of_other_sizes_are_refused(ops):
    with pytest.raises(ValueError, match="expected contiguous"):
        lay_out(ops, bounds=(0, 1, 2))
    with pytest.raises(ValueError, match="expected contiguous"):
        lay_out(ops).advance(int64(5, 6).view(2, 1), int32(1))


@native_ops
@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_without_a_block_is_refused(ops, position):
    with pytest.raises(IndexError, match="outside its request's blocks"):
        ops.compute_slot_mapping(
            int32(3, 4).view(1, 2), int32(0, 1), int64(position), 4
        )


@native_ops
@pytest.mark.parametrize(("row", "num_columns"), [(2, 1), (-1, 1), (0, 9)])
def test_rows_and_columns_that_do_not_exist_are_not_gathered(ops, row, num_columns):
    with pytest.raises(IndexError, match="columns of rows"):
        ops.gather_rows(TOKENS, int32(row), num_columns)


@native_ops
@pytest.mark.parametrize("row", [-1, 2])
def test_rows_that_do_not_exist_are_not_written(ops, row):
    rows = DRAFTS.clone()
    with pytest.raises(IndexError, match="a request row"):
        ops.scatter_rows(int64(5, 6, 7).view(1, 3), int32(row), rows)
    with pytest.raises(ValueError, match="2 columns"):
        ops.scatter_rows(int64(5, 6).view(1, 2), int32(0), rows)
    assert torch.equal(rows, DRAFTS)


@native_ops
def test_rows_that_no_request_owns_are_refused(ops):
    verdicts = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(IndexError, match="own 3 logit rows"):
        ops.take_accepted_prefix(verdicts, int64(1, 2, 3), int32(0, 2), 4)


@native_ops
@pytest.mark.parametrize(("row", "num_sampled"), [(2, 1), (-1, 1), (0, 3)])
def test_samples_outside_the_request_rows_are_refused(ops, row, num_sampled):
    tokens, total_len = TOKENS.clone(), int32(4, 4)
    rows = RequestRows(tokens, total_len, DRAFTS, int32(3, 3), BLOCKS, 4)
    layout = RowLayout(int32(row), int32(0, 2), 2, int32(0, 2), 2)
    with pytest.raises(IndexError, match="outside the request rows"):
        FusedRows(ops, rows).lay_out(layout).advance(
            int64(5, 6).view(1, 2), int32(num_sampled)
        )
    assert tokens.sum().item() == 0
    assert total_len.tolist() == [4, 4]


@native_ops
@pytest.mark.parametrize(("row", "budget"), [(1, 1), (0, 3), (0, -1)])
def test_drafts_that_do_not_exist_are_not_admitted(ops, row, budget):
    with pytest.raises(IndexError, match="no such row, or too few drafts"):
        ops.admit_drafts(torch.ones(1, 3), int32(row), int32(2), budget)


@native_ops
def test_a_mark_outside_the_counts_is_refused(ops):
    counts = torch.zeros((1, 1, 2, 3), dtype=torch.int32)
    with pytest.raises(IndexError, match="outside its array"):
        ops.count_outcomes(
            counts, int32(2 * 256).view(1, 1), int32(0), int32(0, 2), int32(1), 1, 256
        )


@native_ops
def test_an_array_of_another_type_or_length_is_refused(ops):
    with pytest.raises(ValueError, match="expected 2 contiguous rows"):
        ops.noise_keys(int64(1, 2), int32(1, 2), 0)
    with pytest.raises(ValueError, match="expected 2 contiguous rows"):
        ops.noise_keys(int64(1, 2), int64(1, 2, 3), 0)
