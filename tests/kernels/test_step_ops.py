"""What the operators on the numbers of a step refuse: nothing is read out of an array.

What they compute is tested beside their twins, in tests/v1/worker/gpu.
"""

import pytest
import torch

from tests.kernels.implementations import native_ops


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


TOKENS = torch.zeros((2, 8), dtype=torch.int32)
DRAFTS = torch.zeros((2, 3), dtype=torch.int64)


@native_ops
@pytest.mark.parametrize(
    ("row", "total_len", "bounds"), [(2, 4, (0, 2)), (0, 20, (0, 9)), (0, 4, (0, 1))]
)
def test_inputs_outside_the_request_rows_are_refused(ops, row, total_len, bounds):
    num_tokens = bounds[1] + (bounds == (0, 1))
    with pytest.raises(IndexError, match="outside its request's"):
        ops.lay_out_rows(
            TOKENS, int32(total_len, 4), DRAFTS, int32(3, 3), int32(row),
            int32(*bounds), num_tokens, int32(0, 1), 1,
        )  # fmt: skip


@native_ops
@pytest.mark.parametrize("cu_num_logits", [(0, 3), (0, 1), (1, 2)])
def test_logit_rows_that_are_no_token_rows_are_refused(ops, cu_num_logits):
    num_logits = 3 if cu_num_logits == (0, 3) else 2
    with pytest.raises(IndexError, match="outside its request's"):
        ops.lay_out_rows(
            TOKENS, int32(4, 4), DRAFTS, int32(3, 3), int32(0), int32(0, 2), 2,
            int32(*cu_num_logits), num_logits,
        )  # fmt: skip


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
    with pytest.raises(IndexError, match="outside the request rows"):
        ops.post_update(
            int64(5, 6).view(1, 2), int32(num_sampled), int32(0, 2), int32(0, 2),
            int32(row), tokens, total_len, int32(3, 3),
        )  # fmt: skip
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
