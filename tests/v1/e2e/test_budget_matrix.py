"""Features x drafters x budgets: how many drafts are verified changes no token."""

from pathlib import Path

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.budget_policies import make_policy
from tests.v1.e2e.conftest import Expect
from tests.v1.e2e.test_feature_matrix import CONDITIONS, run_in_order
from tests.v1.e2e.test_speculation_matrix import RUNS
from tests.v1.e2e.tiny_drafter import make_speculative_config
from tests.v1.e2e.tiny_engine import TinyEngine, visible

pytestmark = bit_for_bit

# All budgets are verified in test_speculation_matrix.
BUDGETS = ["none", "some", "adaptive"]
# One that accepts nearly all, one that finds little, and one that says how sure it is.
DRAFTERS = ["H probabilistic", "ngram", "dspark probabilistic"]
SCORED = [
    "n=3",
    "stop",
    "logprobs 5",
    "logprobs 250",
    "logprob ids",
    "filtered logprobs",
    "prompt_logprobs",
    "all logprobs",
    "choice",
    "grammar",
]


# What some steps of a run must have verified of their drafts.
REGIMES = {"none": "none", "some": "some", "adaptive": "some"}


@pytest.mark.parametrize(
    "condition", ["chunks of 64", "preempting", "warm prefix cache"]
)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_feature_means_what_it_means_without_drafts(
    model: Path,
    expect: Expect,
    tmp_path: Path,
    drafter: str,
    budget: str,
    condition: str,
):
    expected = expect()
    kwargs, run = (CONDITIONS | RUNS)[condition]
    policy = make_policy(budget)
    engine = TinyEngine(
        model,
        speculative_config=make_speculative_config(drafter, model, tmp_path),
        budget_policy=policy,
        **kwargs,
    )
    rounds = run(engine)
    engine.shutdown()
    wrong = [
        name
        for outputs in rounds
        for name, output in outputs.items()
        if visible(output) != expected[name]
    ]
    assert wrong == []
    assert REGIMES[budget] in policy.regimes


@pytest.mark.parametrize(
    "mode", ["raw_logits", "processed_logprobs", "processed_logits"]
)
@pytest.mark.parametrize("budget", ["some", "adaptive"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_kind_of_score_is_the_one_without_drafts(
    model: Path,
    expect: Expect,
    tmp_path: Path,
    drafter: str,
    budget: str,
    mode: str,
):
    expected = expect(mode)
    policy = make_policy(budget)
    engine = TinyEngine(
        model,
        speculative_config=make_speculative_config(drafter, model, tmp_path),
        budget_policy=policy,
        logprobs_mode=mode,
    )
    # Beside one that asks for no score.
    outputs = run_in_order(engine, [*SCORED, "greedy"])
    engine.shutdown()
    assert [
        name for name, output in outputs.items() if visible(output) != expected[name]
    ] == []
    assert REGIMES[budget] in policy.regimes
