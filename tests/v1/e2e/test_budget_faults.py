"""Two faults of engines whose steps verify fewer drafts than were scheduled, planted.

In both, one field speaks of two layouts: what was scheduled, and what is verified.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markers import bit_for_bit
from tests.v1.e2e.budget_policies import Sometimes, Watched
from tests.v1.e2e.conftest import Expect
from tests.v1.e2e.test_feature_matrix import run_in_order
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.batch_layout import BatchLayout, ScheduledStep
from vllm.v1.worker.gpu.sample.sampler import LogprobRows, Sampler, SamplingRows
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetPolicy, FixedBudget
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout

SCHEMAS = ["json", "choice", "n=3 regex", "greedy"]
SCORED = ["logprobs 5", "n=3", "stop", "filtered logprobs", "greedy"]

Say = Callable[[list[str], BudgetPolicy], dict[str, Any]]


@pytest.fixture
def say(model: Path) -> Say:
    """Run requests with four drafts each that are all as good as the model."""
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4}

    def run(names: list[str], policy: BudgetPolicy) -> dict[str, Any]:
        watched = Watched(policy)
        engine = TinyEngine(model, speculative_config=config, budget_policy=watched)
        try:
            outputs = run_in_order(engine, names)
        finally:
            engine.shutdown()
        assert watched.regimes == {
            "none" if isinstance(policy, FixedBudget) else "some"
        }
        return {name: visible(output) for name, output in outputs.items()}

    return run


def let_the_scheduled_layout_say_what_is_verified(
    step: ScheduledStep, draft_budget: int, admitted: torch.Tensor
) -> BatchLayout:
    layout = make_verified_layout(step, draft_budget, admitted)
    if draft_budget > 0 or step.num_drafts == 0:
        return layout
    return replace(
        layout,
        cu_num_logits_np=layout.verified_cu_num_logits_np,
        num_scheduled_tokens_np=step.num_tokens_np - step.num_drafts_np,
        num_draft_tokens_per_req=None,
    )


def cut_scores_at_the_hosts_offsets(
    find_logprob_rows: Callable[[Sampler, SamplingRows], LogprobRows | None],
) -> Callable[[Sampler, SamplingRows], LogprobRows | None]:
    def find(self: Sampler, rows: SamplingRows) -> LogprobRows | None:
        found = find_logprob_rows(self, rows)
        if found is None or rows.layout.is_exact_on_host:
            return found
        return replace(found, cu_num_rows=rows.layout.cu_num_logits_np.tolist())

    return find


def test_a_layout_that_forgets_scheduled_drafts_has_too_few_rows_for_the_masks(
    say: Say, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        model_runner,
        "make_verified_layout",
        let_the_scheduled_layout_say_what_is_verified,
    )
    with pytest.raises(AssertionError, match=r"grammar masks for \d+ scheduled rows"):
        say(SCHEMAS, FixedBudget(0))


def test_schemas_are_kept_by_steps_that_verify_no_draft(say: Say, expect: Expect):
    expected = expect()
    said = say(SCHEMAS, FixedBudget(0))
    # The scores differ in their last bits where torch computes the products.
    assert [one["answers"][0]["text"] for one in said.values()] == [
        expected[name]["answers"][0]["text"] for name in SCHEMAS
    ]


@bit_for_bit
def test_scores_belong_to_their_requests_where_only_the_device_knows_the_rows(
    say: Say,
    expect: Expect,
    monkeypatch: pytest.MonkeyPatch,
):
    expected = expect()
    said = say(SCORED, Sometimes())
    assert [name for name in SCORED if said[name] != expected[name]] == []
    wrong_rows = cut_scores_at_the_hosts_offsets(Sampler.find_logprob_rows)
    monkeypatch.setattr(Sampler, "find_logprob_rows", wrong_rows)
    said = say(SCORED, Sometimes())
    wrong = [name for name in SCORED if said[name] != expected[name]]
    assert len(wrong) > 1
    # Text is not what is cut.
    assert all(
        said[name]["answers"][0]["text"] == expected[name]["answers"][0]["text"]
        for name in SCORED
    )
