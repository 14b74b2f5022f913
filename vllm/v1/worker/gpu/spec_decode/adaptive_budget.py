"""The budget of the shipped engine: most tokens a second, by confidences and costs."""

from collections import defaultdict
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
    list_draft_lengths,
)
from vllm.v1.worker.gpu.spec_decode.drafting_switch import DraftingSwitch
from vllm.v1.worker.gpu.spec_decode.long_look import LongLook
from vllm.v1.worker.gpu.spec_decode.plain_steps import PlainStepProbe

# Drafts that a try verifies, of however many requests: enough to learn from, and no
# burden for a large batch.
_NUM_TRIED_DRAFTS = 8


class StepCosts(Protocol):
    """What a step costs on this device, in milliseconds."""

    def step_costs(
        self,
        num_draft_reqs: int,
        num_non_draft_tokens: int,
        max_drafts: int,
        num_next_drafts: int,
    ) -> np.ndarray:
        """Return the cost of the whole step with what is drafted behind it.

        Args:
            num_draft_reqs: requests that drafts are then proposed for.
            num_non_draft_tokens: tokens that the target computes anyway.
            max_drafts: the largest number of drafts beside them.
            num_next_drafts: that are proposed for each request; 0: none are.

        Returns:
            [max_drafts + 1] float64, by the number of drafts that are verified.
        """

    def step_cost_without_drafting(self, num_non_draft_tokens: int) -> float:
        """Return the cost of the whole step if no drafting follows."""

    def observe(
        self,
        num_draft_reqs: int,
        num_tokens: int,
        step_ms: float,
        num_next_drafts: int,
    ) -> None:
        """Learn what a step has cost."""


class AdaptiveBudget(BudgetPolicy):
    """Maximises expected tokens over expected time.

    A choice stands while steps are of its size, until the rounds that it was made from
    are replaced, or patience with its loss would end: to weigh everything in each step
    of one request would cost as much as a draft brings.

    How many drafts are proposed, and whether any are, is decided by the same rule: of
    some lengths the one that would give most tokens a second; and if a step of the same
    requests without drafts would give more, often or by far, none are. Now and then
    more are tried again.

    Args:
        costs: of steps.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # By the number of requests, in doublings: what pays for one of them says
        # nothing about eight.
        self._switches: dict[int, DraftingSwitch] = {}
        self._probes: dict[int, PlainStepProbe] = defaultdict(PlainStepProbe)
        self._looks: dict[int, LongLook] = defaultdict(LongLook)
        # Of the last step in which anything could be drafted, and how many sampled.
        self._switch, self._probe = DraftingSwitch(), PlainStepProbe()
        self._look = LongLook()
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
            self._probe.go_on()
            self._look.save(self._choice.predicted_ms or 0.0)
            return self._choice
        self._num_standing = 0
        is_same = step.num_drafts == 0 and num_reqs == self._num_reqs
        self._is_passed_over = is_same and self._switch.pass_over()
        if self._is_passed_over:
            tokens_ms = self._costs.step_cost_without_drafting(
                step.num_non_draft_tokens
            )
            return BudgetChoice(0, max_next_drafts=0, predicted_ms=tokens_ms)
        past = history.get_past_confidences(step.idx_mapping_np)
        is_testing = self._switch.is_testing
        best_length, next_length = self._choose_lengths(
            past, max_drafts_np * step.is_sampling_np, num_reqs
        )
        gains = expected_gains(past, step.num_drafts_np)
        costs_ms = self._costs.step_costs(
            num_reqs, step.num_non_draft_tokens, step.num_drafts, best_length
        )
        draft_budget = choose_draft_budget(num_reqs, gains, costs_ms)
        if is_testing:
            # What is believed of drafts that are never verified can never be found
            # to be wrong.
            draft_budget = max(draft_budget, min(_NUM_TRIED_DRAFTS, step.num_drafts))
        predicted_ms = float(costs_ms[draft_budget])
        if next_length == 0:
            num_tokens = step.num_non_draft_tokens + draft_budget
            predicted_ms = self._costs.step_cost_without_drafting(num_tokens)
        choice = BudgetChoice(draft_budget, next_length, predicted_ms)
        if next_length == best_length > 0:
            self._look.save(predicted_ms)
            if not is_testing:
                self._choice, self._size = choice, size
                num_standing = min(len(past) - 1, self._switch.num_harmless_steps)
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
            timing.max_next_drafts,
        )

    def _choose_lengths(
        self, past: np.ndarray, allowed_np: np.ndarray, num_reqs: int
    ) -> tuple[int, int]:
        """Say how many drafts the requests that sample now are to have next.

        Args:
            past: confidences, as `expected_gains` takes them.
            allowed_np: [num_reqs of the step] int32, the most drafts of each.
            num_reqs: how many sample.

        Returns:
            Drafts of a request at which drafting does best; and those to propose: as
            many, none, or more of them to learn from.
        """
        most = max(allowed_np.tolist(), default=0)
        if most == 0:
            return 0, 0
        best_length, best, drafting_ms = 0, 0.0, {}
        for length in list_draft_lengths(past.shape[2], most):
            gains = expected_gains(past, np.minimum(allowed_np, np.int32(length)))
            costs_ms = self._costs.step_costs(
                num_reqs, num_reqs, len(gains) - 1, length
            )
            drafting_ms[length] = float(costs_ms[0])
            speed = ((num_reqs + gains) / costs_ms).max()
            # More drafts for the same: more to choose from.
            if speed >= best:
                best_length, best = length, speed
        alone = num_reqs / self._costs.step_cost_without_drafting(num_reqs)
        self._enter(num_reqs)
        speedup = float(best / alone)
        if not self._switch.decide(speedup):
            self._probe.restart()
            return best_length, 0
        longest = length
        if self._switch.is_testing:
            return best_length, longest
        if self._probe.take_turn(speedup):
            return best_length, 0
        self._probe.go_on()
        price_ms = drafting_ms[longest] - drafting_ms[best_length]
        if best_length < longest and self._look.take_turn(price_ms):
            return best_length, longest
        return best_length, best_length

    def _enter(self, num_reqs: int) -> None:
        """Take up what is remembered of batches of this size."""
        size = num_reqs.bit_length()
        if size not in self._switches:
            # A batch that fills up, request by request, must not lose at each size what
            # it may lose once.
            is_growing = num_reqs > self._num_reqs
            switch = self._switch.make_for_larger_batch()
            self._switches[size] = switch if is_growing else DraftingSwitch()
        self._switch, self._num_reqs = self._switches[size], num_reqs
        self._probe, self._look = self._probes[size], self._looks[size]
