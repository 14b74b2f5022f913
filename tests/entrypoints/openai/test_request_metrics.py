"""The `metrics` of an answer, by the names that clients read."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app, make_fake_config
from tests.entrypoints.openai.serving import call, read_events
from vllm.config import ObservabilityConfig
from vllm.entrypoints.openai.request_metrics import make_request_metrics
from vllm.outputs import RequestStateStats, SpecDecodeMetrics

TIMES = ObservabilityConfig(enable_per_request_metrics=True)
DRAFTS = ObservabilityConfig(per_request_spec_decode_metrics="summary")
STATS = RequestStateStats(
    num_generation_tokens=5,
    queued_ts=10.0,
    scheduled_ts=10.5,
    first_token_ts=11.0,
    last_token_ts=13.0,
    first_token_latency=1.25,
)
NO_TIMES = {
    "time_to_first_token_ms": None,
    "generation_time_ms": None,
    "queue_time_ms": None,
    "mean_itl_ms": None,
    "tokens_per_second": None,
}


def to_json(
    config: ObservabilityConfig, stats: RequestStateStats | None, num_answers: int = 1
) -> Any:
    metrics = make_request_metrics(config, stats, num_answers)
    return json.loads(msgspec.json.encode(metrics))


def observed(level: str, *steps: tuple[int, int]) -> RequestStateStats:
    metrics = SpecDecodeMetrics.make(2, is_detailed=level == "detailed")
    for step in steps:
        metrics.observe(*step)
    return replace(STATS, spec_decode_metrics=metrics)


def test_times_are_in_milliseconds_and_rates_per_token_after_the_first():
    assert to_json(TIMES, STATS) == {
        "time_to_first_token_ms": 1250.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
        "speculative_decoding": None,
    }


def test_one_token_has_no_rate_and_none_has_no_time():
    one = replace(STATS, num_generation_tokens=1, last_token_ts=11.0)
    metrics = to_json(TIMES, one)
    assert metrics["time_to_first_token_ms"] == 1250.0
    assert metrics["generation_time_ms"] == 0.0
    assert metrics["mean_itl_ms"] is metrics["tokens_per_second"] is None
    none = to_json(TIMES, RequestStateStats(queued_ts=10.0, scheduled_ts=10.5))
    assert none == NO_TIMES | {"speculative_decoding": None}


SUMMARY = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.6,
    "acceptance_histogram": [1, 1, 1],
    "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [0, 1, 1]},
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 5,
    "num_spec_tokens": 2,
}


def test_a_summary_has_exactly_the_fields_that_clients_know():
    stats = observed("summary", (2, 2), (1, 0), (2, 1))
    assert to_json(DRAFTS, stats) == NO_TIMES | {"speculative_decoding": SUMMARY}


def test_detailed_metrics_add_a_number_for_each_step():
    stats = observed("detailed", (2, 2), (1, 0), (2, 1))
    config = ObservabilityConfig(per_request_spec_decode_metrics="detailed")
    assert to_json(config, stats)["speculative_decoding"] == SUMMARY | {
        "per_step_accepted": [2, 0, 1],
        "per_step_drafted": [2, 1, 2],
    }


def test_several_answers_have_no_metrics_in_common():
    assert make_request_metrics(TIMES, STATS, 2) is None


def test_a_server_without_the_flags_does_not_know_the_field():
    assert make_request_metrics(ObservabilityConfig(), STATS, 1) is msgspec.UNSET


# Where they are in an answer.

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "abc"},
}


async def ask(path: str, config: ObservabilityConfig = DRAFTS, **fields: Any) -> Any:
    engine = FakeEngine(
        vllm_config=replace(make_fake_config(), observability_config=config)
    )
    return await call(make_app(engine), path, BODIES[path] | fields)


@pytest.mark.parametrize("path", BODIES)
async def test_metrics_are_at_the_root_of_an_answer(path):
    answer = (await ask(path)).json()
    assert answer["metrics"] == NO_TIMES | {"speculative_decoding": None}


@pytest.mark.parametrize("path", BODIES)
async def test_without_the_flags_no_answer_has_metrics(path):
    config = ObservabilityConfig()
    assert "metrics" not in (await ask(path, config)).json()
    options = {"include_usage": True}
    response = await ask(path, config, stream=True, stream_options=options)
    assert all("metrics" not in event for event in read_events(response))


@pytest.mark.parametrize("path", BODIES)
async def test_metrics_ride_the_last_chunk_of_a_stream(path):
    options = {"include_usage": True}
    response = await ask(path, stream=True, stream_options=options)
    *chunks, last = read_events(response)
    assert all("metrics" not in chunk for chunk in chunks)
    assert last["metrics"] == NO_TIMES | {"speculative_decoding": None}
    assert last["choices"] == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_without_a_usage_chunk_has_no_metrics(path):
    events = read_events(await ask(path, stream=True))
    assert all("metrics" not in event for event in events)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"prompt": ["ab", "cd"]}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_metrics_of_several_answers_are_null(path, fields, is_streamed):
    if not is_streamed:
        assert (await ask(path, **fields)).json()["metrics"] is None
        return
    options = {"include_usage": True}
    response = await ask(path, stream=True, stream_options=options, **fields)
    assert read_events(response)[-1]["metrics"] is None
