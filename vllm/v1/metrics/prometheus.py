"""The metrics of the engine, by the names that dashboards know."""

from dataclasses import asdict

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, Histogram

from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.metric_factory import (
    PREFIX,
    MetricFactory,
    build_1_2_5_buckets,
)
from vllm.v1.metrics.spec_decode_metrics import SpecDecodeMetrics
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    ParentRequestStats,
    SchedulerStats,
)

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


def get_prometheus_registry() -> CollectorRegistry:
    """Return the registry that /metrics shows."""
    return REGISTRY


def unregister_vllm_metrics(registry: CollectorRegistry) -> None:
    """Forget the metrics of an engine that this process had before."""
    # The registry has no public list of its collectors.
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            registry.unregister(collector)


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
        labels = {
            "model_name": vllm_config.model_config.served_model_name[0],
            "engine": str(engine_index),
        }
        self._factory = MetricFactory(self._registry, labels)
        unregister_vllm_metrics(self._registry)
        self._make_scheduler_metrics()
        self._spec_decode: SpecDecodeMetrics | None = None
        if vllm_config.num_speculative_tokens > 0:
            self._spec_decode = SpecDecodeMetrics(
                self._factory,
                vllm_config.num_speculative_tokens,
                vllm_config.scheduler_config.max_num_seqs,
            )
        self._make_token_metrics()
        self._make_request_metrics(vllm_config.model_config.max_model_len)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
    ) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
            if self._spec_decode is not None:
                self._spec_decode.record(scheduler_stats)
        if iteration_stats is None:
            return
        self._record_tokens(iteration_stats)
        for request in iteration_stats.finished_requests:
            self._record_request(request)
        for parent in iteration_stats.finished_parents:
            self._record_parent(parent)

    def log_engine_initialized(self, num_gpu_blocks: int, cache_dtype: str) -> None:
        values = asdict(self._vllm_config.cache_config)
        values |= {"num_gpu_blocks": num_gpu_blocks, "cache_dtype": cache_dtype}
        labels = {name: str(value) for name, value in values.items()}
        info = Gauge(
            PREFIX + "cache_config_info",
            "Size and policy of the KV cache",
            ["model_name", "engine", *labels],
            registry=self._registry,
        )
        info.labels(**self._factory.labels, **labels).set(1)

    def _make_scheduler_metrics(self) -> None:
        self._num_running = self._factory.gauge(
            "num_requests_running", "Requests in the batch"
        )
        self._num_waiting = self._factory.gauge(
            "num_requests_waiting", "Requests that wait for their first step"
        )
        self._num_waiting_by_reason = {
            reason: self._factory.gauge(
                "num_requests_waiting_by_reason",
                "Waiting requests: for room (capacity) or for a grammar (deferred)",
                reason=reason,
            )
            for reason in ("capacity", "deferred")
        }
        self._kv_cache_usage = self._factory.gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1"
        )
        self._num_preemptions = self._factory.counter(
            "num_preemptions", "Requests that gave their blocks back"
        )
        self._prefix_queries = self._factory.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._factory.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._num_corrupted = self._factory.counter(
            "corrupted_requests", "Requests whose logits held NaN"
        )
        self._iteration_tokens = self._factory.histogram(
            "iteration_tokens_total", "Tokens of a step", ITERATION_TOKENS_BUCKETS
        )

    def _make_token_metrics(self) -> None:
        self._prompt_tokens = self._factory.counter("prompt_tokens", "Prompt tokens")
        self._prompt_tokens_by_source = {
            source: self._factory.counter(
                "prompt_tokens_by_source",
                "Prompt tokens by where their KV cache came from",
                source=source,
            )
            for source in ("local_compute", "local_cache_hit")
        }
        self._prompt_tokens_cached = self._factory.counter(
            "prompt_tokens_cached", "Prompt tokens that were not computed again"
        )
        self._generation_tokens = self._factory.counter(
            "generation_tokens", "Generated tokens"
        )
        self._time_to_first_token = self._factory.histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._inter_token_latency = self._factory.histogram(
            "inter_token_latency_seconds",
            "Between two outputs of a request",
            TOKEN_LATENCY_BUCKETS,
        )

    def _make_request_metrics(self, max_model_len: int) -> None:
        self._success = {
            str(reason): self._factory.counter(
                "request_success",
                "Finished requests by reason",
                finished_reason=str(reason),
            )
            for reason in FinishReason
        }
        self._time_per_output_token = self._factory.histogram(
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
        self._request_prompt_tokens = self._factory.histogram(
            "request_prompt_tokens", "Prompt tokens of a request", buckets
        )
        self._request_generation_tokens = self._factory.histogram(
            "request_generation_tokens", "Generated tokens of a request", buckets
        )
        self._request_prefill_kv_computed_tokens = self._factory.histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed, not found in the cache",
            buckets,
        )
        self._request_max_num_generation_tokens = self._factory.histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of the longest of a request's n answers",
            buckets,
        )
        self._request_params_max_tokens = self._factory.histogram(
            "request_params_max_tokens", "The max_tokens of a request", buckets
        )
        self._request_params_n = self._factory.histogram(
            "request_params_n", "The n of a request", NUM_SEQUENCES_BUCKETS
        )

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        num_deferred = stats.num_waiting_for_grammar_reqs
        self._num_running.set(stats.num_running_reqs)
        self._num_waiting.set(stats.num_waiting_reqs + num_deferred)
        self._num_waiting_by_reason["deferred"].set(num_deferred)
        self._num_waiting_by_reason["capacity"].set(stats.num_waiting_reqs)
        self._kv_cache_usage.set(stats.kv_cache_usage)
        for counter, count in (
            (self._num_preemptions, stats.num_preempted),
            (self._prefix_queries, stats.prefix_cache_stats.queries),
            (self._prefix_hits, stats.prefix_cache_stats.hits),
            (self._num_corrupted, stats.num_corrupted_reqs),
        ):
            # Most steps add to none of them.
            if count:
                counter.inc(count)
        num_tokens = stats.step_prompt_tokens + stats.step_generation_tokens
        if num_tokens:
            self._iteration_tokens.observe(num_tokens)

    def _record_tokens(self, stats: IterationStats) -> None:
        if stats.num_prompt_tokens:
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

    def _request_time(self, name: str, documentation: str) -> Histogram:
        return self._factory.histogram(name, documentation, REQUEST_TIME_BUCKETS)
