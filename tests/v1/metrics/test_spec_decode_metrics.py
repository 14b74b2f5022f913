from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.v1.engine.fakes import make_config
from vllm.config import SpeculativeConfig
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.reader import Vector, get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.calibration import NUM_BINS, CalibrationStats
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    SpecDecodingStep,
    StepCost,
    VerificationStats,
)

LABELS = {"model_name": "fake", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prometheus(registry: CollectorRegistry) -> PrometheusStatLogger:
    config = replace(
        make_config(Path("/nowhere")), speculative_config=SpeculativeConfig("ngram", 3)
    )
    return PrometheusStatLogger(config, registry=registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:spec_decode_{name}", LABELS | labels)


def make_drafts(*proposals: tuple[int, int, int]) -> SpecDecodingStats:
    stats = SpecDecodingStats.make(3)
    for num_drafted, *step in proposals:
        stats.observe(num_drafted, SpecDecodingStep(*step))
    return stats


def test_drafted_admitted_and_accepted_tokens_are_counted_apart(prometheus, registry):
    for drafts in (make_drafts((3, 2, 1)), make_drafts((3, 3, 3), (3, 0, 0))):
        prometheus.record(SchedulerStats(spec_decoding_stats=drafts), None)
    assert value(registry, "num_drafts_total") == 3
    assert value(registry, "num_draft_tokens_total") == 9
    assert value(registry, "num_admitted_tokens_total") == 5
    assert value(registry, "num_accepted_tokens_total") == 4
    metrics = {one.name: one for one in get_metrics_snapshot(registry)}
    for kind, counts in (("admitted", [2, 2, 1]), ("accepted", [2, 1, 1])):
        vector = metrics[f"vllm:spec_decode_num_{kind}_tokens_per_pos"]
        assert isinstance(vector, Vector)
        assert vector.values == counts


def test_budgets_are_those_of_steps_with_drafts(prometheus, registry):
    for verification in (
        VerificationStats(2, 6, 0),
        VerificationStats(2, 6, 4),
        VerificationStats(2, 0, 0),
    ):
        prometheus.record(SchedulerStats(verification=verification), None)
    assert value(registry, "draft_budget_count") == 2
    assert value(registry, "draft_budget_sum") == 4
    assert value(registry, "draft_budget_bucket", le="0.0") == 1
    assert value(registry, "draft_budget_bucket", le="2.0") == 1
    assert value(registry, "draft_budget_bucket", le="5.0") == 2


def test_predicted_and_measured_time_are_of_the_same_steps(prometheus, registry):
    prometheus.record(SchedulerStats(step_cost=StepCost(5, 0.25, 0.5)), None)
    prometheus.record(SchedulerStats(), None)
    prometheus.record(SchedulerStats(step_cost=StepCost(5, 0.25, 0.125)), None)
    assert value(registry, "predicted_step_seconds_total") == 0.5
    assert value(registry, "measured_step_seconds_total") == 0.625


def test_the_calibration_error_is_told_where_it_is_known(prometheus, registry):
    assert value(registry, "calibration_error", position="0") is None
    sums = [[0.0] * (3 * NUM_BINS) for _ in range(3)]
    # Ten drafts at the second place, predicted to survive 7.5 times; 5 have.
    for entry, number in zip(sums, (10.0, 7.5, 5.0), strict=True):
        entry[NUM_BINS + 11] = number
    prometheus.record(SchedulerStats(calibration=CalibrationStats(*sums)), None)
    assert value(registry, "calibration_error", position="1") == 0.25
    assert value(registry, "calibration_error", position="0") is None


def test_without_speculation_there_are_no_such_metrics():
    registry = CollectorRegistry()
    PrometheusStatLogger(make_config(Path("/nowhere")), registry=registry)
    assert not [one.name for one in registry.collect() if "spec_decode" in one.name]
