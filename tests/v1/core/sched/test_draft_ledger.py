import numpy as np
import pytest

from vllm.config import ObservabilityConfig
from vllm.v1.core.sched.draft_ledger import DraftLedger, count_drafts
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    SchedulerOutput,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.calibration import NUM_BINS
from vllm.v1.spec_decode.metrics import StepCost, VerificationStats
from vllm.v1.spec_decode.trace import DraftTrace

DRAFTS = {"a": [1, 2, 3], "b": [4, 5]}


STEP = SchedulerOutput([], CachedRequestData(), {"a": 4, "b": 3, "c": 1}, 8, DRAFTS)


def count(num_verified=None, grammar=None):
    result = ModelRunnerOutput(
        list("abc"), {}, [[], [], []], num_verified_drafts=num_verified or {}
    )
    if grammar is not None:
        req_ids, num_acceptable = grammar
        grammar = GrammarOutput(req_ids, np.zeros((0, 1), np.int32), num_acceptable)
    counts = count_drafts(STEP, result, grammar)
    return {
        req_id: (entry.num_drafted, entry.num_verified)
        for req_id, entry in counts.items()
    }


@pytest.mark.parametrize(
    ("num_verified", "grammar", "expected"),
    [
        ({}, None, {"a": (3, 3), "b": (2, 2)}),
        # Nobody had drafts when the mask was made.
        ({}, (["a"], None), {"a": (3, 3), "b": (2, 2)}),
        ({}, (["b", "c"], [1, 0]), {"a": (3, 3), "b": (1, 1)}),
        ({"a": 0}, None, {"a": (3, 0), "b": (2, 2)}),
        # The tighter of the two limits holds.
        ({"a": 2}, (["a", "b"], [1, 2]), {"a": (1, 1), "b": (2, 2)}),
        ({"a": 1}, (["a", "b"], [2, 0]), {"a": (2, 1), "b": (0, 0)}),
    ],
)
def test_trimmed_drafts_are_not_verified_and_forbidden_ones_are_none(
    num_verified, grammar, expected
):
    assert count(num_verified, grammar) == expected


class Reader:
    """Runs steps through a ledger whose clock stands until it is moved."""

    def __init__(self, *, log_stats: bool = True, dashboard: bool = False) -> None:
        self.now_s = 100.0
        self.ledger = DraftLedger(
            3,
            ObservabilityConfig(enable_dashboard=dashboard),
            log_stats=log_stats,
            clock=lambda: self.now_s,
        )

    def run_step(self, *, num_sampled: dict[str, int], grammar=None, **fields):
        """Return what each request is told."""
        req_ids = ["b", "a", "c"]
        result = ModelRunnerOutput(
            req_ids, {name: i for i, name in enumerate(req_ids)}, [], **fields
        )
        self.ledger.open_step(STEP, result, grammar)
        settled = {
            name: self.ledger.settle(name, count) for name, count in num_sampled.items()
        }
        self.ledger.close_step(len(num_sampled))
        return settled

    def report(self, *, is_idle: bool = False) -> SchedulerStats:
        stats = SchedulerStats()
        self.ledger.report(stats, is_idle=is_idle)
        return stats


CONFIDENCES = [[0.5, 0.5, np.nan], [1.0, 0.5, 0.8], [np.nan] * 3]


def test_the_budget_is_what_was_verified_also_of_requests_that_have_gone():
    reader = Reader()
    reader.run_step(num_sampled={"b": 1, "c": 1}, num_verified_drafts={"a": 1})
    stats = reader.report()
    assert stats.verification == VerificationStats(2, 5, 3)
    assert stats.spec_decoding_stats.num_drafts == 1
    assert reader.report().verification is None


def test_survival_is_held_against_what_became_of_verified_drafts():
    reader = Reader()
    # b has both drafts verified and one accepted, a one of three, which is accepted.
    reader.run_step(
        num_sampled={"a": 2, "b": 2, "c": 1},
        num_verified_drafts={"a": 1},
        draft_confidences=CONFIDENCES,
    )
    calibration = reader.report().calibration
    num_pairs = np.reshape(calibration.num_pairs, (3, NUM_BINS))
    assert num_pairs.sum(axis=1).tolist() == [2, 1, 0]
    happened = np.reshape(calibration.happened, (3, NUM_BINS))
    assert happened.sum(axis=1).tolist() == [2, 0, 0]


def test_a_verified_draft_that_a_grammar_refuses_has_not_survived():
    reader = Reader()
    reader.run_step(
        num_sampled={"a": 2},
        grammar=GrammarOutput(["a"], np.zeros((4, 1), np.int32), [1]),
        num_verified_drafts={"a": 2},
        draft_confidences=CONFIDENCES,
    )
    calibration = reader.report().calibration
    # Of the first draft and of the refused one; the third was trimmed.
    assert sum(calibration.num_pairs) == 2
    assert sum(calibration.happened) == 1


def test_predictions_of_survival_are_products_of_confidences():
    reader = Reader(dashboard=True)
    settled = reader.run_step(
        num_sampled={"a": 1, "b": 3},
        num_verified_drafts={"a": 2},
        draft_confidences=CONFIDENCES,
    )
    first, second = settled["a"].trace, settled["b"].trace
    assert first == DraftTrace([1, 2, 3], 2, 3, 0, first.survivals)
    assert first.survivals == pytest.approx([1.0, 0.5, 0.4])
    assert second == DraftTrace([4, 5], 2, 2, 2, [0.5, 0.25])
    calibration = reader.report().calibration
    assert sum(calibration.predicted) == pytest.approx(1.0 + 0.5 + 0.5 + 0.25)
    assert sum(calibration.happened) == 2


def test_calibration_is_reported_from_time_to_time_and_at_the_end():
    reader = Reader()
    step = {"num_sampled": {"a": 1}, "draft_confidences": CONFIDENCES}
    num_pairs = []
    for seconds, is_idle in ((0.0, False), (0.6, False), (0.6, False), (0.1, True)):
        reader.now_s += seconds
        reader.run_step(**step)
        calibration = reader.report(is_idle=is_idle).calibration
        num_pairs.append(None if calibration is None else sum(calibration.num_pairs))
    assert num_pairs == [3, None, 6, 3]


def test_the_cost_of_a_step_is_reported_once():
    reader = Reader()
    cost = StepCost(9, 0.1, 0.2)
    reader.run_step(num_sampled={"a": 1}, step_cost=cost)
    assert reader.report().step_cost == cost
    reader.run_step(num_sampled={"a": 1})
    assert reader.report().step_cost is None


def test_without_statistics_and_dashboard_nothing_is_kept():
    reader = Reader(log_stats=False)
    settled = reader.run_step(
        num_sampled={"a": 2, "c": 1}, draft_confidences=CONFIDENCES
    )
    assert [entry.step or entry.trace for entry in settled.values()] == [None, None]
    assert reader.report() == SchedulerStats()
