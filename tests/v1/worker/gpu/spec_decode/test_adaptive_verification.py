"""The plan of a step: its number is of the past, its ranking of the drafts at hand."""

import dataclasses

import numpy as np
import pytest
import torch

from vllm.v1.spec_decode.metrics import StepCost
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerifier
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetChoice,
    BudgetPolicy,
    FixedBudget,
    StepTiming,
    VerifyAll,
)
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

NUM_DRAFTS = 2


class Recording(BudgetPolicy):
    """Takes a given number, and keeps what it was asked and told."""

    def __init__(self, draft_budget: int = 0) -> None:
        self.draft_budget = draft_budget
        self.timings: list[StepTiming] = []

    def choose(self, step, max_drafts_np, history) -> BudgetChoice:
        return BudgetChoice(self.draft_budget, max_next_drafts=0, predicted_ms=3.0)

    def observe_step(self, timing: StepTiming) -> None:
        self.timings.append(timing)


class Verifier:
    """A verifier over rows, and a clock that the test moves."""

    def __init__(self, policy: BudgetPolicy, device: torch.device) -> None:
        self.now = 0.0
        self.device = device
        self.verifier = AdaptiveVerifier(4, NUM_DRAFTS, device, clock=lambda: self.now)
        self.verifier.policy = policy

    def add(self, *rows: int) -> None:
        for row in rows:
            self.verifier.add_request(row)
        self.verifier.apply_staged_writes()

    def propose(self, confidences, rows) -> None:
        rows_np = np.array(rows, dtype=np.int32)
        probs = torch.tensor(confidences, device=self.device)
        drafts = Drafts(
            torch.zeros_like(probs, dtype=torch.int64),
            torch.full((len(rows),), NUM_DRAFTS, dtype=torch.int32).to(self.device),
            probs,
        )
        mapping = torch.from_numpy(rows_np).to(self.device)
        self.verifier.observe_drafts(rows_np, mapping, drafts)

    def plan(self, rows, num_drafts):
        rows_np = np.array(rows, dtype=np.int32)
        drafts_np = np.array(num_drafts, dtype=np.int32)
        is_sampling = np.ones(len(rows), dtype=bool)
        step = ScheduledStep(rows_np, drafts_np + 1, drafts_np, is_sampling, 1)
        mapping = torch.from_numpy(rows_np).to(self.device)
        caps_np = np.full(len(rows), NUM_DRAFTS, dtype=np.int32)
        return self.verifier.plan(step, mapping, caps_np)


def test_the_ranking_follows_the_confidences_of_the_drafts_themselves(device):
    steps = Verifier(FixedBudget(2), device)
    steps.add(0, 3)
    steps.propose([[0.9, 0.9], [0.1, 0.1]], rows=[0, 3])
    steps.propose([[0.1, 0.1], [0.9, 0.9]], rows=[0, 3])
    plan = steps.plan([3, 0], [2, 2])
    assert plan.draft_budget == 2
    assert plan.admitted.tolist() == [2, 0]
    # A request that has left is not counted.
    assert steps.plan([0], [2]).admitted.tolist() == [2]


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [(FixedBudget(0), [0, 0]), (FixedBudget(9), [2, 1]), (VerifyAll(), [2, 1])],
)
def test_none_and_all_need_no_confidences(policy, admitted, device):
    steps = Verifier(policy, device)
    steps.add(0, 1)
    plan = steps.plan([0, 1], [2, 1])
    assert plan.admitted.tolist() == admitted
    assert plan.admitted.dtype == torch.int32
    assert plan.draft_budget == sum(admitted)


def test_a_row_that_nothing_was_proposed_for_is_the_last_to_be_verified(device):
    steps = Verifier(FixedBudget(2), device)
    steps.add(0, 1)
    steps.propose([[0.9, 0.9], [0.1, 0.1]], rows=[0, 1])
    steps.add(0)
    assert steps.plan([0, 1], [2, 2]).admitted.tolist() == [0, 2]


def test_a_plan_does_not_change(device):
    steps = Verifier(Recording(), device)
    steps.add(0)
    plan = steps.plan([0], [2])
    assert plan.max_next_drafts == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.draft_budget = 1


def test_a_budget_of_more_drafts_than_there_are_is_a_fault(device):
    steps = Verifier(Recording(5), device)
    steps.add(0)
    with pytest.raises(AssertionError, match="5 for 2 drafts"):
        steps.plan([0], [2])


def test_a_step_is_timed_while_requests_go_on(device):
    policy = Recording(1)
    steps = Verifier(policy, device)
    steps.add(0)
    steps.plan([0], [2])
    steps.now = 0.25
    # The engine may have slept in between: nobody was there before.
    steps.add(1)
    steps.plan([1], [2])
    assert policy.timings == []
    steps.now = 0.375
    steps.add(2)
    steps.plan([1, 2], [2, 0])
    assert policy.timings == [StepTiming(1, 2, False, 125.0)]
    steps.now = 0.5
    steps.plan([1, 2], [2, 0])
    assert policy.timings[1:] == [StepTiming(2, 3, False, 125.0)]
    # Told once.
    assert steps.verifier.take_step_cost() == StepCost(3, 0.003, 0.125)
    assert steps.verifier.take_step_cost() is None


def test_a_forced_policy_is_gone_afterwards_and_its_steps_are_not_timed(device):
    policy = Recording(1)
    steps = Verifier(policy, device)
    steps.add(0)
    with steps.verifier.forced_policy(FixedBudget(0)):
        assert steps.plan([0], [2]).draft_budget == 0
    assert steps.plan([0], [2]).draft_budget == 1
    assert policy.timings == []


def test_who_verifies_everything_copies_nothing(device):
    steps = Verifier(VerifyAll(), device)
    steps.add(0)
    steps.propose([[0.9, 0.9]], rows=[0])
    with steps.verifier.forced_policy(FixedBudget(1)):
        # Had they been taken, request 0 would be the first.
        steps.add(1)
        steps.propose([[0.5, 0.5]], rows=[1])
        assert steps.plan([0, 1], [2, 2]).admitted.tolist() == [0, 1]
