"""The operators that a draft budget is chosen with, against their twins."""

import numpy as np
import pytest
import torch

from tests.kernels.implementations import native_ops
from vllm.v1.worker.gpu.spec_decode.accepted_prefix import _take_accepted_prefix_torch
from vllm.v1.worker.gpu.spec_decode.confidence_history import (
    _count_round_numpy,
    _read_rounds_numpy,
    _record_round_torch,
)
from vllm.v1.worker.gpu.spec_decode.cost_correction import (
    _correct_costs_numpy,
    _make_prior,
)
from vllm.v1.worker.gpu.spec_decode.draft_budget import _expected_gains_numpy
from vllm.v1.worker.gpu.spec_decode.verified_layout import _add_and_sum_torch

NAN = float("nan")
NUM_SLOTS, MAX_NUM_REQS, MAX_DRAFTS = 4, 6, 3
# The rows of a step, and of a round; not in order.
ROWS = np.array([4, 0, 5], dtype=np.int32)


def make_rounds(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return confidences, some unknown or out of bounds, and whose they are."""
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_SLOTS, MAX_NUM_REQS, MAX_DRAFTS
    rounds = 1.4 * torch.rand(shape, generator=generator) - 0.2
    rounds[torch.rand(shape, generator=generator) < 0.3] = NAN
    tenants = torch.randint(0, 2, (NUM_SLOTS, MAX_NUM_REQS), generator=generator)
    return rounds, tenants, torch.ones(MAX_NUM_REQS, dtype=torch.int64)


@native_ops
@pytest.mark.parametrize("seed", range(4))
def test_past_confidences_equal_the_twins(ops, seed):
    typical = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64)
    arguments = *make_rounds(seed), typical, [3, 0, 2], ROWS
    expected = _read_rounds_numpy(*arguments)
    np.testing.assert_array_equal(ops.read_rounds(*arguments), expected)


@native_ops
def test_what_is_read_lives_until_it_is_read(ops, monkeypatch):
    read_rounds, spoilt = ops._c.read_rounds, []

    def read_later(*args):
        # Whoever allocates as much in between gets the memory of what is freed.
        spoilt.extend(np.full(3, 2**40) for _ in range(16))
        return read_rounds(*args)

    monkeypatch.setattr(ops._c, "read_rounds", read_later)
    typical = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64)
    arguments = *make_rounds(0), typical, [3, 0, 2], ROWS
    expected = _read_rounds_numpy(*arguments)
    np.testing.assert_array_equal(ops.read_rounds(*arguments), expected)


@native_ops
@pytest.mark.parametrize("seed", range(4))
def test_a_round_moves_what_is_typical_as_the_twin_does(ops, seed):
    rounds, round_tenants, tenants = make_rounds(seed)
    states = []
    for count in ops.count_round, _count_round_numpy:
        typical = torch.full((MAX_DRAFTS,), 0.6, dtype=torch.float64)
        num_counted = torch.tensor([4, 255, 256])
        count(rounds, round_tenants, tenants, 1, ROWS, 256, typical, num_counted)
        states.append((typical.tolist(), num_counted.tolist()))
    assert states[0] == states[1]
    assert states[0][0] != [0.6] * MAX_DRAFTS


@native_ops
def test_a_proposal_is_recorded_as_the_twin_does(ops):
    confidence_probs = torch.rand(3, MAX_DRAFTS)
    num_drafts = torch.tensor([3, 0, 1], dtype=torch.int32)
    written = []
    for record in ops.record_round, _record_round_torch:
        live = torch.ones(MAX_NUM_REQS, MAX_DRAFTS)
        rounds, round_tenants, tenants = make_rounds(0)
        record(
            confidence_probs, num_drafts, torch.from_numpy(ROWS), live, tenants, 2,
            rounds, round_tenants,
        )  # fmt: skip
        written.append((live, rounds, round_tenants))
    for actual, expected in zip(*written, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rounds[2], live, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(round_tenants[2], tenants)


@native_ops
@pytest.mark.parametrize("num_rounds", [1, 2, 8])
@pytest.mark.parametrize("num_drafts", [[1], [3], [2, 0, 3, 1]])
def test_gains_equal_the_twins(ops, num_rounds, num_drafts):
    generator = np.random.default_rng(num_rounds)
    past = generator.random((num_rounds, len(num_drafts), MAX_DRAFTS))
    # Ties, and survivals of 0 among drafts that are there.
    past[:, :, 1:].round(1, out=past[:, :, 1:])
    arguments = past, np.array(num_drafts, dtype=np.int32), sum(num_drafts)
    # The order in which NumPy sums the rounds of a single column is its own affair.
    np.testing.assert_allclose(
        ops.expected_gains(*arguments),
        _expected_gains_numpy(*arguments),
        rtol=0 if sum(num_drafts) > 1 else 1e-15,
    )


@native_ops
def test_costs_are_corrected_as_by_the_twin(ops):
    prior = torch.from_numpy(_make_prior(1, 5))
    states = [
        (correct, torch.zeros(7, dtype=torch.float64), prior.clone())
        for correct in (ops.correct_costs, _correct_costs_numpy)
    ]
    generator = np.random.default_rng(0)
    for _ in range(50):
        weights = generator.random(7)
        draft_ms, verify_ms, step_ms = generator.random(3) + [0.0, 0.5, 0.5]
        numbers = 2, float(draft_ms), float(verify_ms), float(step_ms), 0.1, 2.0, 1e-3
        errors = [
            correct(log_factors, covariance, prior, weights, *numbers)
            for correct, log_factors, covariance in states
        ]
        # Sums of products, in orders of their own.
        assert errors[0] == pytest.approx(errors[1], rel=1e-9, abs=1e-12)
    (_, factors, covariance), (_, wanted_factors, wanted_covariance) = states
    torch.testing.assert_close(factors, wanted_factors, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(covariance, wanted_covariance, rtol=1e-9, atol=1e-12)


@native_ops
@pytest.mark.parametrize("num_reqs", [1, 3, 17])
def test_offsets_equal_the_twins(ops, num_reqs):
    counts = torch.randint(0, 9, (2, num_reqs), dtype=torch.int32)
    admitted = torch.randint(0, 4, (num_reqs,), dtype=torch.int32)
    expected = _add_and_sum_torch(counts, admitted)
    for sums, wanted in zip(ops.add_and_sum(counts, admitted), expected, strict=True):
        assert torch.equal(sums, wanted)


@native_ops
def test_greedy_drafts_are_judged_as_row_by_row(ops):
    # Two drafts accepted; a request without a row; one unknown draft, and one that only
    # another request's row would say; a bonus row alone.
    likeliest = torch.tensor([7, 8, 9, -1, 5, 6, 7, 3])
    input_ids = torch.tensor([1, 7, 8, 2, -1, 2, 9, 7])
    cu_num_logits = torch.tensor([0, 3, 3, 5, 7, 8], dtype=torch.int32)
    sampled, num_sampled = ops.verify_greedy(likeliest, input_ids, cu_num_logits, 4)
    drafts = ops.drafts_behind(
        input_ids, torch.tensor([0, 1, 2, 0, 1, 0, 1, 0], dtype=torch.int32)
    )
    expected = _take_accepted_prefix_torch(
        (drafts >= 0) & (drafts == likeliest), likeliest, cu_num_logits, 4
    )
    assert sampled.tolist() == expected[0].tolist()
    assert num_sampled.tolist() == expected[1].tolist() == [3, 0, 1, 1, 1]


@native_ops
@pytest.mark.parametrize("row", [-1, MAX_NUM_REQS])
def test_a_row_outside_the_history_is_refused(ops, row):
    rounds, round_tenants, tenants = make_rounds(0)
    rows = np.array([row], dtype=np.int32)
    typical = torch.ones(MAX_DRAFTS, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(IndexError, match="a request row"):
        ops.read_rounds(rounds, round_tenants, tenants, typical, [0], rows)
    with pytest.raises(IndexError, match="a request row"):
        ops.count_round(
            rounds, round_tenants, tenants, 0, rows, 9, typical,
            torch.ones(MAX_DRAFTS, dtype=torch.int64),
        )  # fmt: skip
    with pytest.raises(IndexError, match="a request row"):
        ops.record_round(
            torch.ones(1, MAX_DRAFTS), one, torch.from_numpy(rows), rounds[0].clone(),
            tenants, 0, rounds, round_tenants,
        )  # fmt: skip
    live = torch.ones(MAX_NUM_REQS, MAX_DRAFTS)
    with pytest.raises(IndexError, match="a request row"):
        ops.record_round(
            torch.zeros(2, MAX_DRAFTS), one.repeat(2),
            torch.tensor([0, row], dtype=torch.int32), live, tenants, 0, rounds,
            round_tenants,
        )  # fmt: skip
    assert (live == 1).all()


@native_ops
def test_a_slot_that_does_not_exist_is_refused(ops):
    typical = torch.ones(MAX_DRAFTS, dtype=torch.float64)
    rounds, round_tenants, tenants = make_rounds(0)
    with pytest.raises(IndexError, match="a slot"):
        ops.read_rounds(rounds, round_tenants, tenants, typical, [NUM_SLOTS], ROWS)
    with pytest.raises(IndexError, match="a slot"):
        ops.count_round(
            rounds, round_tenants, tenants, -1, ROWS, 9, typical,
            torch.ones(MAX_DRAFTS, dtype=torch.int64),
        )  # fmt: skip
    with pytest.raises(IndexError, match="a slot"):
        ops.record_round(
            torch.ones(3, MAX_DRAFTS), torch.ones(3, dtype=torch.int32),
            torch.from_numpy(ROWS), rounds[0].clone(), tenants, NUM_SLOTS, rounds,
            round_tenants,
        )  # fmt: skip


@native_ops
@pytest.mark.parametrize(("num_drafts", "total"), [([4], 4), ([-1], -1), ([2], 3)])
def test_drafts_that_the_requests_do_not_have_gain_nothing(ops, num_drafts, total):
    with pytest.raises((IndexError, ValueError)):
        ops.expected_gains(
            np.ones((2, 1, MAX_DRAFTS)), np.array(num_drafts, dtype=np.int32), total
        )


@native_ops
def test_rows_that_no_request_owns_are_not_verified(ops):
    with pytest.raises(IndexError, match="own 3 logit rows"):
        ops.verify_greedy(
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
            torch.tensor([0, 2], dtype=torch.int32),
            4,
        )


@native_ops
def test_sizes_that_do_not_belong_together_are_refused(ops):
    counts = torch.zeros((2, 3), dtype=torch.int32)
    with pytest.raises(ValueError, match="for 2 requests"):
        ops.add_and_sum(counts, torch.zeros(2, dtype=torch.int32))
    square, factors = torch.eye(3, dtype=torch.float64), torch.zeros(2)
    with pytest.raises(ValueError, match="a covariance"):
        ops.correct_costs(
            factors.double(),
            square,
            square,
            np.ones(2),
            1,
            1.0,
            1.0,
            1.0,
            0.1,
            2.0,
            0.1,
        )
