import msgspec
import numpy as np
import pytest

from vllm.v1.metrics.dashboard.aggregates import (
    NUM_SECONDS,
    BatchSizeTable,
    CostRecord,
    LatencySample,
    Timeline,
    describe_positions,
)
from vllm.v1.metrics.dashboard.data import BatchSizeData, SecondData
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.calibration import Calibration
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    SpecDecodingStep,
    StepCost,
    VerificationStats,
)


def drafts(*proposals: tuple[int, int, int]) -> SpecDecodingStats:
    """Return the counts of (drafted, verified, accepted) proposals of up to 3."""
    stats = SpecDecodingStats.make(3)
    for num_drafted, *step in proposals:
        stats.observe(num_drafted, SpecDecodingStep(*step))
    return stats


def test_batches_are_counted_by_size_in_powers_of_two():
    table = BatchSizeTable()
    table.observe(VerificationStats(1, 3, 2), drafts((3, 2, 1)))
    table.observe(VerificationStats(3, 6, 4), drafts((3, 3, 3), (3, 1, 0)))
    table.observe(VerificationStats(4, 3, 0), drafts((3, 0, 0)))
    table.observe(VerificationStats(9, 0, 0), None)
    assert table.get() == [
        BatchSizeData(1, 1, 1, 1, 2, 3, 2, 1),
        BatchSizeData(3, 4, 2, 7, 4, 9, 4, 3),
        BatchSizeData(9, 16, 1, 9, 0, 0, 0, 0),
    ]


def test_a_step_that_samples_nothing_is_no_batch():
    table = BatchSizeTable()
    table.observe(VerificationStats(0, 0, 0), drafts())
    assert table.get() == []


def test_the_error_of_costs_is_relative_to_what_was_measured():
    record = CostRecord()
    assert record.get().error is None
    record.observe(StepCost(10, 0.02, 0.025))
    record.observe(StepCost(30, 0.05, 0.04))
    cost = record.get()
    assert (cost.num_steps, cost.predicted_s, cost.measured_s) == (
        2,
        pytest.approx(0.07),
        pytest.approx(0.065),
    )
    assert cost.error == pytest.approx((0.2 + 0.25) / 2)
    assert cost.points == [
        (10, pytest.approx(20), pytest.approx(25)),
        (30, pytest.approx(50), pytest.approx(40)),
    ]


def test_the_record_of_costs_is_bounded():
    record = CostRecord()
    for _ in range(1000):
        record.observe(StepCost(1, 0.1, 0.1))
    assert record.get().num_steps == 1000
    assert len(record.get().points) == 400


def test_steps_are_summed_up_by_second():
    timeline = Timeline()
    stats = SchedulerStats(
        num_running_reqs=2,
        step_prompt_tokens=7,
        step_generation_tokens=3,
        spec_decoding_stats=drafts((3, 2, 1)),
    )
    timeline.observe(10.2, stats)
    timeline.observe(10.9, msgspec.structs.replace(stats, num_running_reqs=1))
    timeline.observe(12.0, SchedulerStats(step_generation_tokens=1))
    assert timeline.get(13.5) == [
        SecondData(3, 14, 6, 2, 6, 4, 2),
        SecondData(1, 0, 1, 0, 0, 0, 0),
    ]


def test_old_seconds_are_forgotten():
    timeline = Timeline()
    for second in range(NUM_SECONDS + 5):
        timeline.observe(float(second), SchedulerStats())
    ages = [second.age_s for second in timeline.get(NUM_SECONDS + 4.0)]
    assert ages == list(range(NUM_SECONDS - 1, -1, -1))
    assert timeline.get(3.0 * NUM_SECONDS) == []


def test_quantiles_are_values_that_occurred():
    sample = LatencySample()
    assert (sample.get().num_values, sample.get().p50) == (0, None)
    sample.observe([0.4, 0.1, 0.3, 0.2])
    latency = sample.get()
    assert (latency.p50, latency.p90, latency.p99) == (0.2, 0.4, 0.4)
    sample.observe([9.0] * 1024)
    assert sample.get().p50 == 9.0
    assert sample.get().num_values == 1024


def test_positions_have_their_counts_beside_their_calibration():
    calibration = Calibration(3)
    calibration.observe(
        np.array([[0.9, 0.5, 0.4], [0.8, 0.5, 0.1]]), np.array([2, 1]), np.array([1, 1])
    )
    first, second, third = describe_positions(drafts((3, 2, 1), (3, 1, 1)), calibration)
    assert (first.num_admitted, first.num_accepted) == (2, 2)
    assert (first.predicted, first.happened) == (pytest.approx(0.85), 1.0)
    assert first.error == pytest.approx(0.15)
    assert first.bins == [(pytest.approx(0.8), 1, 1), (pytest.approx(0.9), 1, 1)]
    assert (second.num_admitted, second.num_accepted) == (1, 0)
    assert (second.predicted, second.happened, second.error) == (0.5, 0.0, 0.5)
    assert (third.predicted, third.happened, third.error, third.bins) == (
        None,
        None,
        None,
        [],
    )
