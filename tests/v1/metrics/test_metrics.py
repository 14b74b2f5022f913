import logging
import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.v1.engine.fakes import make_config
from vllm.outputs import RequestStateStats
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from vllm.v1.metrics.loggers import (
    LoggingStatLogger,
    PrefixCacheHitRate,
    StatLoggerManager,
)
from vllm.v1.metrics.metric_factory import build_1_2_5_buckets
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, get_metrics_snapshot
from vllm.v1.metrics.stats import (
    IterationStats,
    ParentRequestStats,
    PrefixCacheStats,
    SchedulerStats,
)

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "corrupted_requests",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
]


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def prometheus(registry):
    config = make_config(Path("/nowhere"), max_model_len=64)
    return PrometheusStatLogger(config, registry=registry)


def finished_request(**fields):
    """Return the statistics of a step that ends one request."""
    stats = IterationStats(now=10.0)
    state = RequestStateStats(
        num_generation_tokens=5,
        arrival_time=6.0,
        queued_ts=100.0,
        scheduled_ts=101.0,
        first_token_ts=103.0,
        last_token_ts=103.5,
    )
    stats.update_from_finished_request("stop", 30, 10, 50, state)
    return stats


def value(registry, name, **labels):
    labels = {"model_name": "fake", "engine": "0"} | labels
    return registry.get_sample_value("vllm:" + name, labels)


def test_every_documented_name_is_shown(prometheus, registry):
    prometheus.log_engine_initialized(64, "float16")
    names = {metric.name for metric in registry.collect()}
    assert names == {"vllm:" + name for name in NAMES}


def test_counters_are_exposed_with_total(prometheus, registry):
    prometheus.record(None, IterationStats(num_generation_tokens=3))
    text = generate_latest(registry).decode()
    line = 'vllm:generation_tokens_total{engine="0",model_name="fake"} 3.0'
    assert line in text


def test_gauges_follow_the_scheduler(prometheus, registry):
    prometheus.record(
        SchedulerStats(
            num_running_reqs=3,
            num_waiting_reqs=2,
            num_waiting_for_grammar_reqs=1,
            kv_cache_usage=0.25,
        ),
        None,
    )
    assert value(registry, "num_requests_running") == 3
    assert value(registry, "num_requests_waiting") == 3
    by_reason = "num_requests_waiting_by_reason"
    assert value(registry, by_reason, reason="capacity") == 2
    assert value(registry, by_reason, reason="deferred") == 1
    assert value(registry, "kv_cache_usage_perc") == 0.25


def test_steps_are_counted_in_tokens(prometheus, registry):
    stats = SchedulerStats(step_prompt_tokens=10, step_generation_tokens=2)
    prometheus.record(stats, None)
    prometheus.record(SchedulerStats(), None)
    assert value(registry, "iteration_tokens_total_count") == 1
    assert value(registry, "iteration_tokens_total_sum") == 12


def test_prompt_tokens_are_split_by_source(prometheus, registry):
    stats = IterationStats(num_prompt_tokens=30, num_cached_prompt_tokens=16)
    prometheus.record(None, stats)
    by_source = "prompt_tokens_by_source_total"
    assert value(registry, by_source, source="local_compute") == 14
    assert value(registry, by_source, source="local_cache_hit") == 16
    assert value(registry, "prompt_tokens_cached_total") == 16


def test_times_of_a_finished_request(prometheus, registry):
    prometheus.record(None, finished_request())
    success = "request_success_total"
    assert value(registry, success, finished_reason="stop") == 1
    assert value(registry, success, finished_reason="abort") == 0
    assert value(registry, "e2e_request_latency_seconds_sum") == 4.0
    assert value(registry, "request_queue_time_seconds_sum") == 1.0
    assert value(registry, "request_prefill_time_seconds_sum") == 2.0
    assert value(registry, "request_decode_time_seconds_sum") == 0.5
    assert value(registry, "request_inference_time_seconds_sum") == 2.5
    per_token = "request_time_per_output_token_seconds_sum"
    assert value(registry, per_token) == pytest.approx(0.125)
    assert value(registry, "request_prefill_kv_computed_tokens_sum") == 20
    assert value(registry, "request_params_max_tokens_sum") == 50


def test_n_is_counted_once_a_request(prometheus, registry):
    stats = IterationStats(finished_parents=[ParentRequestStats(4, 9)])
    prometheus.record(None, stats)
    assert value(registry, "request_params_n_sum") == 4
    assert value(registry, "request_max_num_generation_tokens_sum") == 9


def test_a_second_engine_in_a_process_replaces_the_first(prometheus, registry):
    prometheus.record(None, IterationStats(num_generation_tokens=3))
    PrometheusStatLogger(make_config(Path("/nowhere")), registry=registry)
    assert value(registry, "generation_tokens_total") == 0


def test_token_buckets_are_1_2_5_up_to_the_context():
    assert build_1_2_5_buckets(64) == (1, 2, 5, 10, 20, 50)
    assert build_1_2_5_buckets(1) == (1,)


def test_the_snapshot_gives_plain_values(prometheus, registry):
    prometheus.record(SchedulerStats(num_running_reqs=2), finished_request())
    metrics = {metric.name: metric for metric in get_metrics_snapshot(registry)}
    labels = {"model_name": "fake", "engine": "0"}
    running = metrics["vllm:num_requests_running"]
    assert running == Gauge("vllm:num_requests_running", labels, 2.0)
    assert isinstance(metrics["vllm:prompt_tokens"], Counter)
    latency = metrics["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert (latency.count, latency.sum) == (1, 4.0)
    assert (latency.buckets["2.5"], latency.buckets["+Inf"]) == (0, 1)


def test_the_hit_rate_forgets_old_requests():
    rate = PrefixCacheHitRate(max_requests=2)
    assert rate.rate == 0.0
    rate.observe(PrefixCacheStats(requests=1, queries=10, hits=0))
    rate.observe(PrefixCacheStats(requests=1, queries=10, hits=5))
    assert rate.rate == 0.25
    rate.observe(PrefixCacheStats(requests=1, queries=10, hits=10))
    assert rate.rate == 0.75


def test_the_hit_rate_starts_anew_when_the_cache_is_reset():
    rate = PrefixCacheHitRate()
    rate.observe(PrefixCacheStats(requests=1, queries=10, hits=10))
    rate.observe(PrefixCacheStats(reset=True))
    assert rate.rate == 0.0


class Collector(logging.Handler):
    """Keeps the level and the text of each record."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def log_lines():
    """Collect what the periodic logger writes, with the level."""
    logger = logging.getLogger("vllm.v1.metrics.loggers")
    level, collector = logger.level, Collector()
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    yield collector.lines
    logger.removeHandler(collector)
    logger.setLevel(level)


def test_the_periodic_line_is_word_for_word_what_parsers_expect(log_lines):
    now = iter([0.0, 10.0])
    stat_logger = LoggingStatLogger(clock=lambda: next(now))
    stat_logger.record(
        SchedulerStats(
            num_running_reqs=4,
            num_waiting_reqs=2,
            kv_cache_usage=0.125,
            prefix_cache_stats=PrefixCacheStats(1, 10, 4),
        ),
        IterationStats(num_prompt_tokens=100, num_generation_tokens=205),
    )
    stat_logger.log()
    assert log_lines == [
        (
            "INFO",
            "Engine 000: Avg prompt throughput: 10.0 tokens/s, "
            "Avg generation throughput: 20.5 tokens/s, Running: 4 reqs, "
            "Waiting: 2 reqs, GPU KV cache usage: 12.5%, "
            "Prefix cache hit rate: 40.0%",
        )
    ]


def test_an_idle_engine_logs_once_and_then_only_for_debugging(log_lines):
    stat_logger = LoggingStatLogger()
    stat_logger.record(None, IterationStats(num_generation_tokens=1))
    for _ in range(3):
        stat_logger.log()
    assert [level for level, _ in log_lines] == ["INFO", "INFO", "DEBUG"]


def test_without_statistics_nothing_is_registered():
    manager = StatLoggerManager(make_config(Path("/nowhere")), log_stats=False)
    manager.record(SchedulerStats(), finished_request())
    manager.log_engine_initialized(64, "float16")
    manager.log()


def test_only_the_first_scheduling_counts_as_the_end_of_queueing():
    state = RequestStateStats()
    stats = IterationStats()
    for kind, seconds in (
        (EngineCoreEventType.QUEUED, 1.0),
        (EngineCoreEventType.SCHEDULED, 2.0),
        (EngineCoreEventType.PREEMPTED, 3.0),
        (EngineCoreEventType.SCHEDULED, 4.0),
    ):
        output = EngineCoreOutput("r", [], events=[EngineCoreEvent(kind, seconds)])
        stats.update_from_output(output, 5.0, state)
    assert (state.queued_ts, state.scheduled_ts) == (1.0, 2.0)
    assert stats.num_prompt_tokens == 0


def test_a_request_that_never_ran_has_no_negative_times():
    stats = IterationStats(now=3.0)
    state = RequestStateStats(arrival_time=1.0, queued_ts=50.0)
    stats.update_from_finished_request("abort", 5, 0, None, state)
    [finished] = stats.finished_requests
    assert finished.queued_time == finished.prefill_time == 0.0
    assert not math.isnan(finished.mean_time_per_output_token)
