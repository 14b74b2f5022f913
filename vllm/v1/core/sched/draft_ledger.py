"""What became of drafts: one account for statistics, requests and the dashboard."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm.config import ObservabilityConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.calibration import Calibration
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    SpecDecodingStep,
    StepCost,
    VerificationStats,
)
from vllm.v1.spec_decode.trace import DraftTrace

# Seconds from one report of calibration to the next.
_CALIBRATION_INTERVAL_S = 1.0


class DraftCounts(NamedTuple):
    """Leading drafts of one request in one step.

    Args:
        num_scheduled: all of them.
        num_admitted: those that the budget had room for.
        num_allowed: those that the grammar allows.
    """

    num_scheduled: int
    num_admitted: int
    num_allowed: int

    @property
    def num_drafted(self) -> int:
        """Drafts that tell something of the drafter: not those that are forbidden."""
        return min(self.num_scheduled, self.num_allowed)

    @property
    def num_verified(self) -> int:
        """Drafts that could be accepted: a trimmed one is not a rejected one."""
        return min(self.num_admitted, self.num_allowed)


class SettledDrafts(NamedTuple):
    """What a request's output tells of its drafts; None for nothing.

    Args:
        step: in numbers.
        trace: draft by draft.
    """

    step: SpecDecodingStep | None = None
    trace: DraftTrace | None = None


_NOTHING = SettledDrafts()


class DraftLedger:
    """Follows the drafts of a step from the schedule to the end of each.

    A step is `open_step`, `settle` for each of its requests that is still there, and
    `close_step`.

    Args:
        num_speculative_tokens: drafts that a request can have in one step.
        config: who wants to know.
        log_stats: count for statistics.
        clock: in seconds.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        config: ObservabilityConfig,
        *,
        log_stats: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._is_counting = log_stats and num_speculative_tokens > 0
        self._tells_steps = config.has_spec_decode_metrics
        self._tells_traces = config.enable_dashboard
        self._clock = clock
        self._stats = SpecDecodingStats.make(num_speculative_tokens)
        self._calibration = Calibration(num_speculative_tokens)
        self._last_report_s = -_CALIBRATION_INTERVAL_S
        self._verification: VerificationStats | None = None
        self._step_cost: StepCost | None = None
        # Of the open step.
        self._drafts: dict[str, list[int]] = {}
        self._counts: dict[str, DraftCounts] = {}
        # In the order of the result.
        self._confidences: list[list[float]] | None = None
        self._batch_idx: dict[str, int] = {}
        # (confidences, admitted, accepted) of each settled proposal, up to the next
        # calibration. A refusal by the grammar is predicted too, so a refused draft has
        # not survived.
        self._judged: list[tuple[list[float], int, int]] = []

    def open_step(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        grammar_output: GrammarOutput | None,
    ) -> None:
        """Take a step's drafts, and what is known of all of them.

        Args:
            grammar_output: the step's mask; None if nothing is constrained.
        """
        if not (self._is_counting or self._tells_steps or self._tells_traces):
            return
        self._step_cost = model_runner_output.step_cost or self._step_cost
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        self._counts = count_drafts(
            scheduler_output, model_runner_output, grammar_output
        )
        self._batch_idx = model_runner_output.req_id_to_index
        self._confidences = model_runner_output.draft_confidences

    def settle(self, request_id: str, num_sampled: int) -> SettledDrafts:
        """Count the drafts of a request, if it had any.

        Args:
            num_sampled: the tokens that the step gave it, before a stop cuts them: a
                draft behind it was accepted all the same.
        """
        counts = self._counts.get(request_id)
        if counts is None:
            return _NOTHING
        # Behind the end of a grammar the last mask is repeated, and verifies nothing.
        num_accepted = min(max(num_sampled - 1, 0), counts.num_verified)
        step = SpecDecodingStep(counts.num_verified, num_accepted)
        if self._is_counting:
            self._stats.observe(counts.num_drafted, step)
            confidences = self._get_confidences(request_id)
            if confidences is not None:
                self._judged.append(
                    (confidences, counts.num_admitted, step.num_accepted)
                )
        if not (self._tells_steps or self._tells_traces):
            return _NOTHING
        return SettledDrafts(
            step if self._tells_steps else None,
            self._trace(request_id, counts, step) if self._tells_traces else None,
        )

    def close_step(self, num_sampling_reqs: int) -> None:
        """Sum up the step.

        Args:
            num_sampling_reqs: requests that got a token.
        """
        if not self._is_counting:
            return
        counts = self._counts.values()
        self._verification = VerificationStats(
            num_sampling_reqs,
            sum(entry.num_scheduled for entry in counts),
            sum(entry.num_admitted for entry in counts),
        )

    def report(self, stats: SchedulerStats, *, is_idle: bool) -> None:
        """Put what came together since the last call into `stats`.

        Args:
            is_idle: no step is to follow soon.
        """
        if not self._is_counting:
            return
        # Steps without drafts are many while none pay: they cost nobody a look.
        if self._stats.num_drafts > 0:
            stats.spec_decoding_stats = self._stats
            self._stats = SpecDecodingStats.make(self._num_speculative_tokens)
        stats.verification, self._verification = self._verification, None
        stats.step_cost, self._step_cost = self._step_cost, None
        now = self._clock()
        # Its many numbers tell little of a single step.
        if is_idle or now - self._last_report_s >= _CALIBRATION_INTERVAL_S:
            self._observe_judged()
            stats.calibration = self._calibration.take_stats()
            self._last_report_s = now

    def _get_confidences(self, request_id: str) -> list[float] | None:
        """Return what was predicted of the request's drafts, if anything was."""
        if self._confidences is None or request_id not in self._batch_idx:
            return None
        return self._confidences[self._batch_idx[request_id]]

    def _observe_judged(self) -> None:
        """Calibrate by the proposals since the last time, all at once."""
        judged, self._judged = self._judged, []
        if not judged:
            return
        confidences, num_admitted, num_accepted = zip(*judged, strict=True)
        self._calibration.observe(
            _survivals_of(confidences), np.array(num_admitted), np.array(num_accepted)
        )

    def _trace(
        self, request_id: str, counts: DraftCounts, step: SpecDecodingStep
    ) -> DraftTrace:
        survivals: list[float] = []
        confidences = self._get_confidences(request_id)
        if confidences is not None:
            [survivals] = _survivals_of([confidences[: counts.num_scheduled]]).tolist()
        return DraftTrace(
            self._drafts[request_id],
            counts.num_admitted,
            counts.num_allowed,
            step.num_accepted,
            survivals,
        )


def count_drafts(
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
    grammar_output: GrammarOutput | None,
) -> dict[str, DraftCounts]:
    """Say of each request with drafts how many the budget and the grammar let through.

    Args:
        grammar_output: the step's mask; None if nothing is constrained.
    """
    num_allowed: dict[str, int] = {}
    if grammar_output is not None and grammar_output.num_acceptable_drafts is not None:
        num_allowed = dict(
            zip(
                grammar_output.structured_output_request_ids,
                grammar_output.num_acceptable_drafts,
                strict=True,
            )
        )
    num_admitted = model_runner_output.num_verified_drafts
    counts: dict[str, DraftCounts] = {}
    for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        num_scheduled = len(drafts)
        counts[req_id] = DraftCounts(
            num_scheduled,
            num_admitted.get(req_id, num_scheduled),
            num_allowed.get(req_id, num_scheduled),
        )
    return counts


def _survivals_of(confidences: Sequence[list[float]]) -> np.ndarray:
    """Return [n, num_drafts] float64 of as many confidences."""
    return np.array(confidences).clip(0.0, 1.0).cumprod(1)
