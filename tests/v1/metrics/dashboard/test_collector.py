import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.v1.engine.fakes import make_config
from vllm.config import SpeculativeConfig
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)
from vllm.v1.metrics.dashboard.collector import Dashboard
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
)
from vllm.v1.spec_decode.calibration import NUM_BINS, CalibrationStats
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    SpecDecodingStep,
    StepCost,
    VerificationStats,
)
from vllm.v1.spec_decode.trace import DraftTrace


@pytest.fixture
def dashboard(tokenizer) -> Dashboard:
    now = iter(range(100, 200))
    config = replace(
        make_config(Path("/nowhere")),
        speculative_config=SpeculativeConfig(
            "dspark", 2, enable_adaptive_verification=True
        ),
    )
    return Dashboard(config, tokenizer, clock=lambda: float(next(now)))


def make_stats() -> SchedulerStats:
    drafts = SpecDecodingStats.make(2)
    drafts.observe(2, SpecDecodingStep(1, 1))
    # One sure draft that survived, in the last bin of the first position.
    bins = [0.0] * (2 * NUM_BINS)
    bins[NUM_BINS - 1] = 1.0
    return SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=1,
        num_waiting_for_grammar_reqs=1,
        kv_cache_usage=0.5,
        step_generation_tokens=2,
        spec_decoding_stats=drafts,
        verification=VerificationStats(1, 2, 1),
        step_cost=StepCost(4, 0.01, 0.02),
        calibration=CalibrationStats(bins, bins, bins),
    )


def test_a_step_reaches_every_part(dashboard):
    dashboard.record(make_stats(), None)
    data = dashboard.snapshot()
    assert (data.server.method, data.server.num_speculative_tokens) == ("dspark", 2)
    assert data.server.is_adaptive
    assert data.server.uptime_s == 2.0
    assert (data.load.num_running_reqs, data.load.num_waiting_reqs) == (3, 2)
    assert data.drafts.num_draft_tokens == 2
    assert data.drafts.num_admitted_tokens == data.drafts.num_accepted_tokens == 1
    assert [one.num_admitted for one in data.positions] == [1, 0]
    assert data.pooled_error == 0.0
    assert data.batch_sizes[0].draft_budget == 1
    assert data.cost.error == pytest.approx(0.5)
    assert data.seconds[0].num_generation_tokens == 2


def test_latencies_are_told_by_kind(dashboard):
    finished = FinishedRequestStats("stop", 4.0, 1, 0, 1, None, 0.5, 1, 1, 2, 0)
    stats = IterationStats(
        time_to_first_tokens=[1.0],
        inter_token_latencies=[0.25],
        finished_requests=[finished],
    )
    dashboard.record(None, stats)
    latencies = dashboard.snapshot().latencies
    assert {name: one.p50 for name, one in latencies.items()} == {
        "time_to_first_token": 1.0,
        "inter_token": 0.25,
        "e2e": 4.0,
        "queue": 0.5,
    }


def test_only_the_request_that_is_asked_for_is_told_in_detail(dashboard):
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 90.0)
    output = EngineCoreOutput(
        "r", [40], events=[event], draft_trace=DraftTrace([40, 41], 1, 2, 0)
    )
    outputs = EngineCoreOutputs([output], make_stats(), timestamp=95.0)
    dashboard.trace(outputs)
    data = dashboard.snapshot("r")
    [step] = data.request.steps
    assert (step.num_reqs, step.draft_budget) == (1, 1)
    assert data.requests == [data.request.summary]
    assert dashboard.snapshot().request is dashboard.snapshot("other").request is None
    dashboard.end_requests(["r"], "abort")
    assert dashboard.snapshot().requests[0].state == "abort"


def test_without_anything_the_data_is_complete_json(dashboard):
    data = json.loads(msgspec.json.encode(dashboard.snapshot()))
    assert set(data) == set(dashboard.snapshot().__struct_fields__)
    assert data["pooled_error"] is None


def test_without_speculation_there_are_no_positions(tokenizer):
    dashboard = Dashboard(make_config(Path("/nowhere")), tokenizer)
    dashboard.record(SchedulerStats(step_generation_tokens=1), None)
    data = dashboard.snapshot()
    assert (data.server.method, data.positions, data.batch_sizes) == (None, [], [])


def test_the_data_stays_small_however_long_the_server_runs(dashboard, tokenizer):
    steady = Dashboard(dashboard._config, tokenizer, clock=lambda: 0.0)
    trace = DraftTrace([40, 41], 2, 2, 1, [0.123456789, 0.123456789])
    for number in range(3000):
        event = EngineCoreEvent(EngineCoreEventType.QUEUED, 0.0)
        key = f"request-{number // 100}"
        output = EngineCoreOutput(key, [40, 41], draft_trace=trace)
        if number % 100 == 0:
            output.events = [event]
        stats = make_stats()
        steady.trace(EngineCoreOutputs([output], stats))
        steady.record(stats, IterationStats(time_to_first_tokens=[0.1]))
    size = len(msgspec.json.encode(steady.snapshot("request-29")))
    assert size < 100_000
