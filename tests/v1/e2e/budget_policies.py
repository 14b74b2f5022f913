"""Budgets that tests force on an engine, and what became of them."""

import numpy as np

from tests.v1.spec_decode.linear_costs import LinearCosts
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetChoice,
    BudgetPolicy,
    FixedBudget,
    StepTiming,
    VerifyAll,
)


def choose_length(num_steps: int, max_drafts_np: np.ndarray) -> int | None:
    """Return for how many drafts a proposal is made: all, one or two, step by step."""
    length = (None, 1, None, 2)[num_steps % 4]
    return length if length is None else min(length, int(max_drafts_np.max()))


class Sometimes(BudgetPolicy):
    """A changing share of the drafts, neither none nor all; in some steps no drafting.

    Args:
        pauses: every how many steps no drafts are proposed; None: they always are.
    """

    def __init__(self, pauses: int | None = None) -> None:
        self._num_steps = 0
        self._pauses = pauses

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        self._num_steps += 1
        share = (0.25, 0.5, 0.75)[self._num_steps % 3]
        budget = min(max(int(step.num_drafts * share), 1), step.num_drafts)
        length = choose_length(self._num_steps, max_drafts_np)
        if self._pauses is not None and self._num_steps % self._pauses == 0:
            length = 0
        return BudgetChoice(budget, length)


class InTurn(BudgetPolicy):
    """None, half and all of the drafts, step by step; in some steps no drafting."""

    _PAUSES = 11

    def __init__(self) -> None:
        self._num_steps = 0

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        self._num_steps += 1
        budget = (0, (step.num_drafts + 1) // 2, step.num_drafts)[self._num_steps % 3]
        length = choose_length(self._num_steps, max_drafts_np)
        return BudgetChoice(budget, length if self._num_steps % self._PAUSES else 0)


class Watched(BudgetPolicy):
    """Another policy, of which every choice is kept.

    Attributes:
        choices: (scheduled drafts, budget, most drafts of a request that follow) of a
            step.
    """

    def __init__(self, policy: BudgetPolicy) -> None:
        self._policy = policy
        self.reads_confidences = policy.reads_confidences
        self.choices: list[tuple[int, int, int]] = []

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        choice = self._policy.choose(step, max_drafts_np, history)
        length = choice.max_next_drafts
        if length is None:
            length = int(max_drafts_np.max())
        self.choices.append((step.num_drafts, choice.draft_budget, length))
        return choice

    def observe_step(self, timing: StepTiming) -> None:
        self._policy.observe_step(timing)

    @property
    def regimes(self) -> set[str]:
        """Which regimes the steps with drafts were in."""
        return {
            "none" if budget == 0 else "all" if budget == scheduled else "some"
            for scheduled, budget, _ in self.choices
            if scheduled > 1
        }


def make_policy(name: str) -> Watched:
    """Return the policy of a column of the budget matrix."""
    policies: dict[str, BudgetPolicy] = {
        "none": FixedBudget(0),
        "some": Sometimes(pauses=7),
        "all": VerifyAll(),
        "adaptive": AdaptiveBudget(LinearCosts(2.0, 0.2, 0.05)),
    }
    return Watched(policies[name])
