"""The metrics of speculation."""

from prometheus_client import Counter

from vllm.v1.metrics.metric_factory import MetricFactory, build_1_2_5_buckets
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.calibration import Calibration, CalibrationStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats, StepCost


class SpecDecodeMetrics:
    """Keeps the metrics of drafts up to date.

    Args:
        factory: of the engine's metrics.
        num_speculative_tokens: drafts that a request can have in one step.
        max_num_reqs: requests that a step can have.
    """

    def __init__(
        self, factory: MetricFactory, num_speculative_tokens: int, max_num_reqs: int
    ) -> None:
        self._factory = factory
        self._num_drafts = factory.counter(
            "spec_decode_num_drafts", "Proposals, one a request and step"
        )
        self._num_draft_tokens = factory.counter(
            "spec_decode_num_draft_tokens", "Drafts, but for those a grammar forbids"
        )
        self._num_admitted_tokens = factory.counter(
            "spec_decode_num_admitted_tokens", "Drafts that were verified"
        )
        self._num_accepted_tokens = factory.counter(
            "spec_decode_num_accepted_tokens", "Drafts that were accepted"
        )
        self._num_admitted_tokens_per_pos = self._by_position(
            num_speculative_tokens,
            "spec_decode_num_admitted_tokens_per_pos",
            "Verified drafts by place in the proposal",
        )
        self._num_accepted_tokens_per_pos = self._by_position(
            num_speculative_tokens,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by place in the proposal",
        )
        self._draft_budget = factory.histogram(
            "spec_decode_draft_budget",
            "Drafts that a step with drafts verifies, over all requests",
            (0, *build_1_2_5_buckets(num_speculative_tokens * max_num_reqs)),
        )
        self._predicted_step_s = factory.counter(
            "spec_decode_predicted_step_seconds",
            "What steps were expected to take, of steps whose time became known",
        )
        self._measured_step_s = factory.counter(
            "spec_decode_measured_step_seconds", "What the same steps did take"
        )
        self._calibration = Calibration(num_speculative_tokens)

    def record(self, stats: SchedulerStats) -> None:
        """Take what a step brought."""
        if stats.spec_decoding_stats is not None:
            self._record_drafts(stats.spec_decoding_stats)
        verification = stats.verification
        if verification is not None and verification.num_scheduled_drafts > 0:
            self._draft_budget.observe(verification.draft_budget)
        if stats.step_cost is not None:
            self._record_cost(stats.step_cost)
        if stats.calibration is not None:
            self._record_calibration(stats.calibration)

    def _record_drafts(self, stats: SpecDecodingStats) -> None:
        self._num_drafts.inc(stats.num_drafts)
        self._num_draft_tokens.inc(stats.num_draft_tokens)
        self._num_admitted_tokens.inc(stats.num_admitted_tokens)
        self._num_accepted_tokens.inc(stats.num_accepted_tokens)
        for counters, counts in (
            (self._num_admitted_tokens_per_pos, stats.num_admitted_tokens_per_pos),
            (self._num_accepted_tokens_per_pos, stats.num_accepted_tokens_per_pos),
        ):
            for counter, count in zip(counters, counts, strict=True):
                counter.inc(count)

    def _record_cost(self, cost: StepCost) -> None:
        self._predicted_step_s.inc(cost.predicted_s)
        self._measured_step_s.inc(cost.measured_s)

    def _record_calibration(self, stats: CalibrationStats) -> None:
        self._calibration.add(stats)
        for position, error in enumerate(self._calibration.errors()):
            # A gauge that nobody has set would claim that nothing is wrong.
            if error is not None:
                self._factory.gauge(
                    "spec_decode_calibration_error",
                    "Expected calibration error of the predicted survival of drafts",
                    position=str(position),
                ).set(error)

    def _by_position(
        self, num_positions: int, name: str, documentation: str
    ) -> list[Counter]:
        return [
            self._factory.counter(name, documentation, position=str(position))
            for position in range(num_positions)
        ]
