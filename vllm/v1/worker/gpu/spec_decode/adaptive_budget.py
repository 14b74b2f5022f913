"""The budget of the shipped engine: most tokens a second, by confidences and costs."""

from typing import Protocol

import numpy as np

from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetChoice,
    BudgetPolicy,
    StepTiming,
    choose_draft_budget,
    expected_gains,
)
from vllm.v1.worker.gpu.spec_decode.drafting_switch import DraftingSwitch

# Drafts that a try verifies, of however many requests: enough to learn from, and no
# burden for a large batch.
_NUM_TRIED_DRAFTS = 8


class StepCosts(Protocol):
    """What a step costs on this device, in milliseconds."""

    def step_costs(
        self, num_draft_reqs: int, num_non_draft_tokens: int, max_drafts: int
    ) -> np.ndarray:
        """Return the cost of the whole step if drafting follows.

        Args:
            num_draft_reqs: requests that drafts are then proposed for.
            num_non_draft_tokens: tokens that the target computes anyway.
            max_drafts: the largest number of drafts beside them.

        Returns:
            [max_drafts + 1] float64, by the number of drafts that are verified.
        """

    def step_cost_without_drafting(self, num_non_draft_tokens: int) -> float:
        """Return the cost of the whole step if no drafting follows."""

    def observe(
        self, num_draft_reqs: int, num_tokens: int, step_ms: float, drafted: bool
    ) -> None:
        """Learn what a step has cost."""


class AdaptiveBudget(BudgetPolicy):
    """Maximises expected tokens over expected time.

    A choice stands while steps are of its size, until half of the rounds that it was
    made from are replaced, or patience with its loss would end: to weigh everything in
    each step of one request would cost as much as a draft brings.

    Whether drafts are proposed at all is decided by the same rule: if a step of the
    same requests without drafts would give more tokens a second, often or by far, none
    are; now and then they are tried again.

    Args:
        costs: of steps.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # By the number of requests, in doublings: what pays for one of them says
        # nothing about eight.
        self._switches: dict[int, DraftingSwitch] = {}
        # Of the last step in which anything could be drafted, and how many sampled.
        self._switch = DraftingSwitch()
        self._num_reqs = 0
        # The last step was one of a pause that was not weighed.
        self._is_passed_over = False
        # What was chosen, in a step of which size, and for how many more it stands.
        self._choice = BudgetChoice(0)
        self._size = (0, 0, 0)
        self._num_standing = 0

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        """Weigh every number of drafts, and drafting itself."""
        num_reqs = step.num_sampling_reqs
        size = num_reqs, step.num_non_draft_tokens, step.num_drafts
        if self._num_standing > 0 and size == self._size:
            self._num_standing -= 1
            self._switch.go_on()
            return self._choice
        self._num_standing = 0
        is_same = step.num_drafts == 0 and num_reqs == self._num_reqs
        self._is_passed_over = is_same and self._switch.pass_over()
        if self._is_passed_over:
            tokens_ms = self._costs.step_cost_without_drafting(
                step.num_non_draft_tokens
            )
            return BudgetChoice(0, drafts_next=False, predicted_ms=tokens_ms)
        past = history.get_past_confidences(step.idx_mapping_np)
        gains = expected_gains(past, step.num_drafts_np)
        costs_ms = self._costs.step_costs(
            num_reqs, step.num_non_draft_tokens, step.num_drafts
        )
        draft_budget = choose_draft_budget(num_reqs, gains, costs_ms)
        is_testing = self._switch.is_testing
        if is_testing:
            # What is believed of drafts that are never verified can never be found
            # to be wrong.
            draft_budget = max(draft_budget, min(_NUM_TRIED_DRAFTS, step.num_drafts))
        predicted_ms = float(costs_ms[draft_budget])
        next_drafts_np = max_drafts_np * step.is_sampling_np
        if next_drafts_np.tolist() != step.num_drafts_np.tolist():
            gains = expected_gains(past, next_drafts_np)
        drafts_next = self._decide_drafting(num_reqs, gains)
        if not drafts_next:
            num_tokens = step.num_non_draft_tokens + draft_budget
            predicted_ms = self._costs.step_cost_without_drafting(num_tokens)
        choice = BudgetChoice(draft_budget, drafts_next, predicted_ms)
        if drafts_next and not is_testing:
            self._choice, self._size = choice, size
            num_standing = min(len(past) // 2 - 1, self._switch.num_harmless_steps)
            self._num_standing = max(int(num_standing), 0)
        return choice

    def observe_step(self, timing: StepTiming) -> None:
        """Refine the costs, but by the steps that were passed over."""
        if self._is_passed_over:
            return
        self._costs.observe(
            timing.num_draft_reqs,
            timing.num_tokens,
            timing.step_ms,
            timing.has_drafted,
        )

    def _decide_drafting(self, num_reqs: int, gains: np.ndarray) -> bool:
        """Say whether the requests that sample now are to have drafts next.

        Args:
            num_reqs: how many sample.
            gains: [drafts that they would have + 1] float64, see `expected_gains`.
        """
        num_drafts = len(gains) - 1
        if num_drafts == 0:
            return False
        costs_ms = self._costs.step_costs(num_reqs, num_reqs, num_drafts)
        best = ((num_reqs + gains) / costs_ms).max()
        alone = num_reqs / self._costs.step_cost_without_drafting(num_reqs)
        self._switch = self._find_switch(num_reqs)
        self._num_reqs = num_reqs
        return self._switch.decide(float(best / alone))

    def _find_switch(self, num_reqs: int) -> DraftingSwitch:
        size = num_reqs.bit_length()
        if size not in self._switches:
            # A batch that fills up, request by request, must not lose at each size what
            # it may lose once.
            is_growing = num_reqs > self._num_reqs
            switch = self._switch.make_for_larger_batch()
            self._switches[size] = switch if is_growing else DraftingSwitch()
        return self._switches[size]
