"""Collects what the dashboard shows: bounded, and only while there is a dashboard."""

import time
from collections.abc import Callable, Iterable

from vllm.config import VllmConfig
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.token_texts import TokenTable
from vllm.v1.metrics.dashboard.aggregates import (
    BatchSizeTable,
    CostRecord,
    LatencySample,
    Timeline,
    describe_positions,
)
from vllm.v1.metrics.dashboard.data import (
    DashboardData,
    DraftData,
    LoadData,
    ServerData,
)
from vllm.v1.metrics.dashboard.traces import RequestTraces
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.calibration import Calibration
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.version import __version__


class Dashboard(StatLoggerBase):
    """Sums of the engine's reports, and the last sequences.

    Args:
        clock: seconds of the engine core's clock, which is this machine's.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_drafts = vllm_config.num_speculative_tokens
        self._config = vllm_config
        self._clock = clock
        self._start_s = clock()
        self._load = LoadData()
        self._drafts = SpecDecodingStats.make(num_drafts)
        self._calibration = Calibration(num_drafts)
        self._batch_sizes = BatchSizeTable()
        self._costs = CostRecord()
        self._timeline = Timeline()
        self._latencies = {
            name: LatencySample()
            for name in ("time_to_first_token", "inter_token", "e2e", "queue")
        }
        self._traces = RequestTraces(TokenTable(tokenizer))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_latencies(iteration_stats)

    def trace(self, outputs: EngineCoreOutputs) -> None:
        """Take what a step gave its sequences, before anybody changes it."""
        verification = None
        if outputs.scheduler_stats is not None:
            verification = outputs.scheduler_stats.verification
        for output in outputs.outputs:
            self._traces.observe(
                output,
                outputs.timestamp,
                len(outputs.outputs),
                verification.draft_budget if verification is not None else 0,
            )

    def end_requests(self, request_ids: Iterable[str], state: str) -> None:
        """Note that the front has ended sequences, which the core will not tell of."""
        self._traces.end(request_ids, state)

    def snapshot(self, request_key: str | None = None) -> DashboardData:
        """Return everything as it is now.

        Args:
            request_key: the sequence whose steps are wanted too.
        """
        now = self._clock()
        return DashboardData(
            server=self._describe_server(now),
            load=self._load,
            drafts=DraftData(
                self._drafts.num_drafts,
                self._drafts.num_draft_tokens,
                self._drafts.num_admitted_tokens,
                self._drafts.num_accepted_tokens,
            ),
            positions=describe_positions(self._drafts, self._calibration),
            pooled_error=self._calibration.pooled_error(),
            batch_sizes=self._batch_sizes.get(),
            cost=self._costs.get(),
            seconds=self._timeline.get(now),
            latencies={name: one.get() for name, one in self._latencies.items()},
            requests=self._traces.get(now),
            request=(
                None
                if request_key is None
                else self._traces.get_detail(request_key, now)
            ),
        )

    def _describe_server(self, now: float) -> ServerData:
        speculation = self._config.speculative_config
        return ServerData(
            version=__version__,
            model=self._config.model_config.served_model_name[0],
            method=None if speculation is None else speculation.method,
            num_speculative_tokens=self._config.num_speculative_tokens,
            is_adaptive=speculation is not None
            and speculation.enable_adaptive_verification,
            uptime_s=now - self._start_s,
        )

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._load = LoadData(
            stats.num_running_reqs,
            stats.num_waiting_reqs + stats.num_waiting_for_grammar_reqs,
            stats.kv_cache_usage,
        )
        self._timeline.observe(self._clock(), stats)
        if stats.spec_decoding_stats is not None:
            self._drafts.add(stats.spec_decoding_stats)
        if stats.verification is not None:
            self._batch_sizes.observe(stats.verification, stats.spec_decoding_stats)
        if stats.step_cost is not None:
            self._costs.observe(stats.step_cost)
        if stats.calibration is not None:
            self._calibration.add(stats.calibration)

    def _record_latencies(self, stats: IterationStats) -> None:
        self._latencies["time_to_first_token"].observe(stats.time_to_first_tokens)
        self._latencies["inter_token"].observe(stats.inter_token_latencies)
        for request in stats.finished_requests:
            self._latencies["e2e"].observe([request.e2e_latency])
            self._latencies["queue"].observe([request.queued_time])
