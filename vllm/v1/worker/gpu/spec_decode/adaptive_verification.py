"""Which drafts a step verifies: one plan a step, made before its inputs.

The number of drafts is a policy's, from what is past; it is known to the host, and with
it every size of the step. Which drafts they are is decided on the device, by how sure
the drafter is of these very drafts. So whether a draft is verified depends on nothing
that has seen the draft, and the target's law is kept.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.v1.spec_decode.metrics import StepCost
from vllm.v1.worker.gpu.batch_layout import BatchLayout, ScheduledStep
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.spec_decode.admitted_drafts import admit_drafts
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory
from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    BudgetPolicy,
    StepTiming,
    VerifyAll,
)
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts


@dataclass(frozen=True)
class VerificationPlan:
    """What a step verifies, and whether drafts follow it.

    Args:
        draft_budget: drafts that are verified, over all requests.
        admitted: [num_reqs] int32, on the device: how many leading drafts of each.
        max_next_drafts: of a request, that are proposed at the end of the step; 0: none
            are.
    """

    draft_budget: int
    admitted: torch.Tensor
    max_next_drafts: int


@dataclass(frozen=True)
class _PlannedStep:
    """The last step, until it is known how long it took."""

    start: float
    num_draft_reqs: int
    num_tokens: int
    max_next_drafts: int
    predicted_ms: float | None


class AdaptiveVerifier:
    """Makes the plan of each step, and remembers what plans are made from.

    Args:
        max_num_reqs: rows.
        num_speculative_tokens: drafts of a row.
        device: where drafts are proposed and verified.
        clock: in seconds.

    Attributes:
        policy: decides how many drafts are verified.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy: BudgetPolicy = VerifyAll()
        self._history = ConfidenceHistory(max_num_reqs, num_speculative_tokens, device)
        self._num_speculative_tokens = num_speculative_tokens
        self._clock = clock
        self._last: _PlannedStep | None = None
        self._step_cost: StepCost | None = None
        self._num_added = 0

    @contextmanager
    def forced_policy(self, policy: BudgetPolicy) -> Iterator[None]:
        """Let another policy decide for a while, such as in steps of the warm-up."""
        before, self.policy = self.policy, policy
        try:
            yield
        finally:
            self.policy = before
            self._last = None

    def add_request(self, req_state_idx: int) -> None:
        """Take note of a row's new request."""
        self._history.add_request(req_state_idx)
        self._num_added += 1

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self._history.apply_staged_writes()

    def forget_confidences(self) -> None:
        """Forget past drafts, such as those of steps that were nobody's."""
        self._history.forget()

    def plan(
        self, step: ScheduledStep, idx_mapping: torch.Tensor, max_drafts_np: np.ndarray
    ) -> VerificationPlan:
        """Decide what a step verifies; once a step, before its inputs are made.

        Args:
            step: as it was scheduled.
            idx_mapping: [num_reqs] int32, on the device.
            max_drafts_np: [num_reqs] int32, drafts that the requests may have.
        """
        now = self._clock()
        self._observe_last_step(step, now)
        self._history.begin_step()
        choice = self.policy.choose(step, max_drafts_np, self._history)
        draft_budget = choice.draft_budget
        assert 0 <= draft_budget <= step.num_drafts, (
            f"a budget of {draft_budget} for {step.num_drafts} drafts"
        )
        max_next_drafts = choice.max_next_drafts
        if max_next_drafts is None:
            max_next_drafts = self._num_speculative_tokens
        self._last = _PlannedStep(
            now,
            step.num_sampling_reqs,
            step.num_non_draft_tokens + draft_budget,
            max_next_drafts,
            choice.predicted_ms,
        )
        return VerificationPlan(
            draft_budget,
            self._admit(step, idx_mapping, draft_budget),
            max_next_drafts,
        )

    def get_confidences(
        self, layout: BatchLayout, idx_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        """Return how sure the drafter is of the drafts of the step.

        To be asked before the next drafts are observed.

        Args:
            layout: of the step.
            idx_mapping: [num_reqs] int32.

        Returns:
            [num_reqs, num_speculative_tokens] float32, NaN where there is no draft;
            None if the step has none, or nobody wants to know.
        """
        if layout.num_scheduled_drafts == 0 or not self.policy.reads_confidences:
            return None
        live = self._history.live
        native = ops.maybe_step_ops()
        if native is not None and not live.is_cuda:
            return native.gather_rows(live, idx_mapping, live.shape[1])
        return live[idx_mapping.long()]

    def take_step_cost(self) -> StepCost | None:
        """Return the cost of the last step whose time is known, once."""
        cost, self._step_cost = self._step_cost, None
        return cost

    def observe_drafts(
        self, idx_mapping_np: np.ndarray, idx_mapping: torch.Tensor, drafts: Drafts
    ) -> None:
        """Remember how sure the drafter is of what it has proposed.

        Args:
            idx_mapping_np: [num_reqs] int32, of the step.
            idx_mapping: the same on the device.
            drafts: of its requests.
        """
        if self.policy.reads_confidences:
            self._history.record(idx_mapping_np, idx_mapping, drafts)

    def _admit(
        self, step: ScheduledStep, idx_mapping: torch.Tensor, draft_budget: int
    ) -> torch.Tensor:
        known = step.settled_admissions
        if draft_budget not in known:
            device, settled = idx_mapping.device, step.settle(draft_budget)
            if settled is None:
                num_drafts = to_device(step.num_drafts_np, device)
                live = self._history.live
                return admit_drafts(live, idx_mapping, num_drafts, draft_budget)
            known[draft_budget] = to_device(settled, device)
        return known[draft_budget]

    def _observe_last_step(self, step: ScheduledStep, now: float) -> None:
        """Tell the policy how long the last step took, if the engine was busy since."""
        last, num_added = self._last, self._num_added
        self._num_added = 0
        # A request that was there before has waited for nothing but that step.
        if last is not None and step.num_reqs > num_added:
            timing = StepTiming(
                last.num_draft_reqs,
                last.num_tokens,
                last.max_next_drafts,
                1e3 * (now - last.start),
            )
            self.policy.observe_step(timing)
            if last.predicted_ms is not None:
                self._step_cost = StepCost(
                    last.num_tokens, last.predicted_ms / 1e3, timing.step_ms / 1e3
                )
