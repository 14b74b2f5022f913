"""Where statistics go: a line in the log from time to time, and Prometheus."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingLogging

logger = init_logger(__name__)

# Requests over which the logged hit rate of the prefix cache is taken.
_HIT_RATE_WINDOW_REQUESTS = 1000


class StatLoggerBase(ABC):
    """One destination of the statistics of one engine."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        """Take what one batch of outputs brought."""

    def log(self) -> None:  # noqa: B027 - most destinations need no clock
        """Write what came together since the last call."""

    def log_engine_initialized(  # noqa: B027
        self, num_gpu_blocks: int, cache_dtype: str
    ) -> None:
        """Note the size and dtype of the KV cache."""


class PrefixCacheHitRate:
    """The hit rate over the latest requests."""

    def __init__(self, max_requests: int = _HIT_RATE_WINDOW_REQUESTS) -> None:
        self._max_requests = max_requests
        self._reports: deque[PrefixCacheStats] = deque()
        self._num_requests = 0
        self._num_queries = 0
        self._num_hits = 0

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that were found, 0 to 1."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one report; the oldest leave when the window is full."""
        if stats.reset:
            self._reports.clear()
            self._num_requests = self._num_queries = self._num_hits = 0
        if stats.requests == 0:
            return
        self._reports.append(stats)
        self._add(stats, 1)
        while len(self._reports) > 1 and self._num_requests > self._max_requests:
            self._add(self._reports.popleft(), -1)

    def _add(self, stats: PrefixCacheStats, sign: int) -> None:
        self._num_requests += sign * stats.requests
        self._num_queries += sign * stats.queries
        self._num_hits += sign * stats.hits


class LoggingStatLogger(StatLoggerBase):
    """The periodic line.

    Other programs parse it: new fields go to its end.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, engine_index: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine_index = engine_index
        self._clock = clock
        self._last_time = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._scheduler_stats = SchedulerStats()
        self._hit_rate = PrefixCacheHitRate()
        self._spec_decoding = SpecDecodingLogging()
        self._was_idle = True

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.num_prompt_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._hit_rate.observe(scheduler_stats.prefix_cache_stats)
            self._scheduler_stats = scheduler_stats
            if scheduler_stats.spec_decoding_stats is not None:
                self._spec_decoding.observe(scheduler_stats.spec_decoding_stats)

    def log(self) -> None:
        now = self._clock()
        seconds = max(now - self._last_time, 1e-9)
        prompt_throughput = self._num_prompt_tokens / seconds
        generation_throughput = self._num_generation_tokens / seconds
        self._last_time = now
        self._num_prompt_tokens = self._num_generation_tokens = 0
        stats = self._scheduler_stats
        num_waiting = stats.num_waiting_reqs + stats.num_waiting_for_grammar_reqs
        is_idle = not (
            prompt_throughput
            or generation_throughput
            or stats.num_running_reqs
            or num_waiting
        )
        # The first idle line is worth seeing: it shows that everything came to rest.
        log = logger.debug if is_idle and self._was_idle else logger.info
        self._was_idle = is_idle
        log(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, "
            "Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, GPU KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            self._engine_index,
            prompt_throughput,
            generation_throughput,
            stats.num_running_reqs,
            num_waiting,
            stats.kv_cache_usage * 100,
            self._hit_rate.rate * 100,
        )
        self._spec_decoding.log(seconds)


class StatLoggerManager:
    """Every destination, as one; without statistics it has none.

    Args:
        dashboard: the destination that a page reads, if there is one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        log_stats: bool,
        dashboard: StatLoggerBase | None = None,
    ) -> None:
        self._loggers: list[StatLoggerBase] = []
        if log_stats:
            from vllm.v1.metrics.prometheus import PrometheusStatLogger

            self._loggers = [LoggingStatLogger(), PrometheusStatLogger(vllm_config)]
            if dashboard is not None:
                self._loggers.append(dashboard)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        """Pass on what one batch of outputs brought."""
        for stat_logger in self._loggers:
            stat_logger.record(scheduler_stats, iteration_stats)

    def log(self) -> None:
        """Write what came together since the last call."""
        for stat_logger in self._loggers:
            stat_logger.log()

    def log_engine_initialized(self, num_gpu_blocks: int, cache_dtype: str) -> None:
        """Note the size and dtype of the KV cache."""
        for stat_logger in self._loggers:
            stat_logger.log_engine_initialized(num_gpu_blocks, cache_dtype)
