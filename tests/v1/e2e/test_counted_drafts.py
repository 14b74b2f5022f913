"""What is counted of drafts under forced budgets, from the device to the metrics."""

from pathlib import Path
from typing import Any

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_engine import TinyEngine
from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.metrics.reader import Gauge, Histogram, Metric, Vector
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetPolicy,
    FixedBudget,
    VerifyAll,
)

pytestmark = bit_for_bit

NUM_DRAFTS = 3
PREFIX = "vllm:spec_decode_"


def count(model: Path, policy: BudgetPolicy, *params: Any) -> dict[str, list[Metric]]:
    """Run requests under a drafter that equals its target; return what was counted.

    Every draft that is verified is accepted, unless a grammar forbids it.
    """
    engine = TinyEngine(
        model,
        budget_policy=policy,
        log_stats=True,
        speculative_config={
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": NUM_DRAFTS,
        },
    )
    try:
        defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        engine.run(
            [("hello", SamplingParams(**(defaults | one))) for one in params or [{}]]
        )
        metrics: dict[str, list[Metric]] = {}
        for metric in engine.engine.get_metrics():
            name = metric.name.removeprefix(PREFIX)
            metrics.setdefault(name, []).append(metric)
    finally:
        engine.shutdown()
    return metrics


def totals(metrics: dict[str, list[Metric]]) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "admitted_tokens", "accepted_tokens")
    return {name: metrics[f"num_{name}"][0].value for name in names}


def per_position(metrics: dict[str, list[Metric]], kind: str) -> list[int]:
    [vector] = metrics[f"num_{kind}_tokens_per_pos"]
    assert isinstance(vector, Vector)
    return vector.values


def budgets(metrics: dict[str, list[Metric]]) -> tuple[int, float]:
    """Return the number of steps with drafts, and the sum of their budgets."""
    [histogram] = metrics["draft_budget"]
    assert isinstance(histogram, Histogram)
    return histogram.count, histogram.sum


def test_trimmed_drafts_are_neither_admitted_nor_rejected(model: Path) -> None:
    metrics = count(model, FixedBudget(2))
    # 12 tokens: the first without drafts, thrice two drafts and a token, and two with
    # the one draft that there was room for.
    assert totals(metrics) == {
        "drafts": 4,
        "draft_tokens": 10,
        "admitted_tokens": 7,
        "accepted_tokens": 7,
    }
    assert per_position(metrics, "admitted") == [4, 3, 0]
    assert per_position(metrics, "accepted") == [4, 3, 0]
    assert budgets(metrics) == (4, 7)
    told = [one.labels["position"] for one in metrics["calibration_error"]]
    # Of a place that was never verified nothing is known.
    assert told == ["0", "1"]


def test_a_budget_of_none_admits_nothing(model: Path) -> None:
    metrics = count(model, FixedBudget(0))
    assert totals(metrics) == {
        # In the last step there was no room for a draft.
        "drafts": 10,
        "draft_tokens": 9 * NUM_DRAFTS - 2 - 1 + 2 + 1 - 3 + 3,
        "admitted_tokens": 0,
        "accepted_tokens": 0,
    }
    assert budgets(metrics) == (10, 0)
    assert "calibration_error" not in metrics


def test_all_drafts_are_admitted_without_a_policy(model: Path) -> None:
    metrics = count(model, VerifyAll())
    assert totals(metrics) == {
        "drafts": 3,
        "draft_tokens": 8,
        "admitted_tokens": 8,
        "accepted_tokens": 8,
    }


def test_the_split_of_a_batch_sums_to_its_budgets(model: Path) -> None:
    metrics = count(model, FixedBudget(4), {}, {}, {"num_speculative_tokens": 1})
    counted = totals(metrics)
    num_steps, sum_of_budgets = budgets(metrics)
    assert counted["admitted_tokens"] == sum_of_budgets == counted["accepted_tokens"]
    assert counted["admitted_tokens"] < counted["draft_tokens"]
    assert sum(per_position(metrics, "admitted")) == sum_of_budgets
    assert num_steps > 0


def test_drafts_that_a_grammar_forbids_have_a_budget_and_are_counted_nowhere(
    model: Path,
) -> None:
    choice = StructuredOutputsParams(choice=["zqzqzqzqzq"])
    metrics = count(model, VerifyAll(), {"structured_outputs": choice})
    counted = totals(metrics)
    _, sum_of_budgets = budgets(metrics)
    assert counted["draft_tokens"] == counted["admitted_tokens"] < sum_of_budgets


def test_predicted_and_measured_time_are_told_with_an_adaptive_budget(
    model: Path,
) -> None:
    metrics = count(model, AdaptiveBudget(LinearCosts(2.0, 0.2, 0.05)))
    [predicted] = metrics["predicted_step_seconds"]
    [measured] = metrics["measured_step_seconds"]
    assert predicted.value > 0
    assert measured.value > 0
    assert isinstance(metrics["calibration_error"][0], Gauge)
