"""The metrics of the engine, by the names that dashboards know."""

from dataclasses import asdict
from typing import TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    ParentRequestStats,
    SchedulerStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

PREFIX = "vllm:"

# Seconds, all of them.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
# Counts.
ITERATION_TOKENS_BUCKETS = (1, *(2**power for power in range(3, 15)))
NUM_SEQUENCES_BUCKETS = (1, 2, 5, 10, 20)

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


def get_prometheus_registry() -> CollectorRegistry:
    """Return the registry that /metrics shows."""
    return REGISTRY


def unregister_vllm_metrics(registry: CollectorRegistry) -> None:
    """Forget the metrics of an engine that this process had before."""
    # The registry has no public list of its collectors.
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)


def build_1_2_5_buckets(max_value: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `max_value`."""
    buckets: list[int] = []
    scale = 1
    while scale <= max_value:
        buckets += [
            factor * scale for factor in (1, 2, 5) if factor * scale <= max_value
        ]
        scale *= 10
    return tuple(buckets)


class PrometheusStatLogger(StatLoggerBase):
    """Keeps the metrics up to date.

    Args:
        registry: where they are shown; the process's own if None.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_index: int = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._registry = registry or get_prometheus_registry()
        self._vllm_config = vllm_config
        self._labels = {
            "model_name": vllm_config.model_config.served_model_name[0],
            "engine": str(engine_index),
        }
        self._families: dict[str, MetricWrapperBase] = {}
        unregister_vllm_metrics(self._registry)
        self._make_scheduler_metrics()
        self._make_spec_decode_metrics(vllm_config.num_speculative_tokens)
        self._make_token_metrics()
        self._make_request_metrics(vllm_config.model_config.max_model_len)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
            if scheduler_stats.spec_decoding_stats is not None:
                self._record_spec_decode(scheduler_stats.spec_decoding_stats)
        if iteration_stats is None:
            return
        self._record_tokens(iteration_stats)
        for request in iteration_stats.finished_requests:
            self._record_request(request)
        for parent in iteration_stats.finished_parents:
            self._record_parent(parent)

    def log_engine_initialized(self, num_gpu_blocks: int) -> None:
        values = asdict(self._vllm_config.cache_config)
        values["num_gpu_blocks"] = num_gpu_blocks
        labels = {name: str(value) for name, value in values.items()}
        info = Gauge(
            PREFIX + "cache_config_info",
            "Size and policy of the KV cache",
            ["model_name", "engine", *labels],
            registry=self._registry,
        )
        info.labels(**self._labels, **labels).set(1)

    def _make_scheduler_metrics(self) -> None:
        self._num_running = self._gauge("num_requests_running", "Requests in the batch")
        self._num_waiting = self._gauge(
            "num_requests_waiting", "Requests that wait for their first step"
        )
        self._num_waiting_by_reason = {
            reason: self._gauge(
                "num_requests_waiting_by_reason",
                "Waiting requests: for room (capacity) or for a grammar (deferred)",
                reason=reason,
            )
            for reason in ("capacity", "deferred")
        }
        self._kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1"
        )
        self._num_preemptions = self._counter(
            "num_preemptions", "Requests that gave their blocks back"
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._num_corrupted = self._counter(
            "corrupted_requests", "Requests whose logits held NaN"
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step", ITERATION_TOKENS_BUCKETS
        )

    def _make_spec_decode_metrics(self, num_speculative_tokens: int) -> None:
        if num_speculative_tokens == 0:
            return
        self._num_drafts = self._counter(
            "spec_decode_num_drafts", "Proposals, one a request and step"
        )
        self._num_draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Drafts that were verified"
        )
        self._num_accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Drafts that were accepted"
        )
        self._num_accepted_tokens_per_pos = [
            self._counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted drafts by place in the proposal",
                position=str(position),
            )
            for position in range(num_speculative_tokens)
        ]

    def _record_spec_decode(self, stats: SpecDecodingStats) -> None:
        self._num_drafts.inc(stats.num_drafts)
        self._num_draft_tokens.inc(stats.num_draft_tokens)
        self._num_accepted_tokens.inc(stats.num_accepted_tokens)
        for counter, count in zip(
            self._num_accepted_tokens_per_pos,
            stats.num_accepted_tokens_per_pos,
            strict=True,
        ):
            counter.inc(count)

    def _make_token_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self._prompt_tokens_by_source = {
            source: self._counter(
                "prompt_tokens_by_source",
                "Prompt tokens by where their KV cache came from",
                source=source,
            )
            for source in ("local_compute", "local_cache_hit")
        }
        self._prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that were not computed again"
        )
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between two outputs of a request",
            TOKEN_LATENCY_BUCKETS,
        )

    def _make_request_metrics(self, max_model_len: int) -> None:
        self._success = {
            str(reason): self._counter(
                "request_success",
                "Finished requests by reason",
                finished_reason=str(reason),
            )
            for reason in FinishReason
        }
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first",
            TOKEN_LATENCY_BUCKETS,
        )
        self._e2e_latency = self._request_time(
            "e2e_request_latency_seconds", "From arrival to the end"
        )
        self._queue_time = self._request_time(
            "request_queue_time_seconds", "Waiting for the first step"
        )
        self._prefill_time = self._request_time(
            "request_prefill_time_seconds", "From the first step to the first token"
        )
        self._decode_time = self._request_time(
            "request_decode_time_seconds", "From the first token to the last"
        )
        self._inference_time = self._request_time(
            "request_inference_time_seconds", "From the first step to the last token"
        )
        self._make_request_counts(build_1_2_5_buckets(max_model_len))

    def _make_request_counts(self, buckets: tuple[int, ...]) -> None:
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", buckets
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request", buckets
        )
        self._request_prefill_kv_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed, not found in the cache",
            buckets,
        )
        self._request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest of a request's n answers",
            buckets,
        )
        self._request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens of a request", buckets
        )
        self._request_params_n = self._histogram(
            "request_params_n", "The n of a request", NUM_SEQUENCES_BUCKETS
        )

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        num_deferred = stats.num_waiting_for_grammar_reqs
        self._num_running.set(stats.num_running_reqs)
        self._num_waiting.set(stats.num_waiting_reqs + num_deferred)
        self._num_waiting_by_reason["deferred"].set(num_deferred)
        self._num_waiting_by_reason["capacity"].set(stats.num_waiting_reqs)
        self._kv_cache_usage.set(stats.kv_cache_usage)
        self._num_preemptions.inc(stats.num_preempted)
        self._prefix_queries.inc(stats.prefix_cache_stats.queries)
        self._prefix_hits.inc(stats.prefix_cache_stats.hits)
        self._num_corrupted.inc(stats.num_corrupted_reqs)
        num_tokens = stats.step_prompt_tokens + stats.step_generation_tokens
        if num_tokens:
            self._iteration_tokens.observe(num_tokens)

    def _record_tokens(self, stats: IterationStats) -> None:
        num_cached = stats.num_cached_prompt_tokens
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._prompt_tokens_cached.inc(num_cached)
        self._prompt_tokens_by_source["local_cache_hit"].inc(num_cached)
        self._prompt_tokens_by_source["local_compute"].inc(
            stats.num_prompt_tokens - num_cached
        )
        self._generation_tokens.inc(stats.num_generation_tokens)
        for seconds in stats.time_to_first_tokens:
            self._time_to_first_token.observe(seconds)
        for seconds in stats.inter_token_latencies:
            self._inter_token_latency.observe(seconds)

    def _record_request(self, request: FinishedRequestStats) -> None:
        self._success[request.finish_reason].inc()
        self._e2e_latency.observe(request.e2e_latency)
        self._queue_time.observe(request.queued_time)
        self._prefill_time.observe(request.prefill_time)
        self._decode_time.observe(request.decode_time)
        self._inference_time.observe(request.inference_time)
        if request.num_generation_tokens > 1:
            self._time_per_output_token.observe(request.mean_time_per_output_token)
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_generation_tokens.observe(request.num_generation_tokens)
        self._request_prefill_kv_computed_tokens.observe(
            request.num_prompt_tokens - request.num_cached_tokens
        )
        if request.max_tokens_param is not None:
            self._request_params_max_tokens.observe(request.max_tokens_param)

    def _record_parent(self, parent: ParentRequestStats) -> None:
        self._request_params_n.observe(parent.n_param)
        self._request_max_num_generation_tokens.observe(
            parent.max_num_generation_tokens
        )

    def _gauge(self, name: str, documentation: str, **labels: str) -> Gauge:
        return self._child(Gauge, name, documentation, labels)

    def _counter(self, name: str, documentation: str, **labels: str) -> Counter:
        return self._child(Counter, name, documentation, labels)

    def _histogram(
        self, name: str, documentation: str, buckets: tuple[float, ...]
    ) -> Histogram:
        histogram = Histogram(
            PREFIX + name,
            documentation,
            list(self._labels),
            registry=self._registry,
            buckets=buckets,
        )
        return histogram.labels(**self._labels)

    def _request_time(self, name: str, documentation: str) -> Histogram:
        return self._histogram(name, documentation, REQUEST_TIME_BUCKETS)

    def _child(
        self,
        kind: type[_Metric],
        name: str,
        documentation: str,
        labels: dict[str, str],
    ) -> _Metric:
        """Return the labelled child of a metric, made when its first child is."""
        metric = self._families.get(name)
        if metric is None:
            metric = kind(
                PREFIX + name,
                documentation,
                [*self._labels, *labels],
                registry=self._registry,
            )
            self._families[name] = metric
        assert isinstance(metric, kind), f"{name} is made twice, as two kinds"
        return metric.labels(**self._labels, **labels)
