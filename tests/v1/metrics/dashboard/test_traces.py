import msgspec
import pytest

from tests.v1.engine.test_detokenizer import byte_ids
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from vllm.v1.engine.token_texts import TokenTable
from vllm.v1.metrics.dashboard.traces import (
    MAX_ENTRIES,
    MAX_REQUESTS,
    RequestTraces,
)
from vllm.v1.spec_decode.trace import DraftTrace


@pytest.fixture
def traces(tokenizer: Tokenizer) -> RequestTraces:
    return RequestTraces(TokenTable(tokenizer))


def observe(
    traces: RequestTraces,
    token_ids: list[int],
    trace: DraftTrace | None = None,
    *,
    key: str = "r",
    queued_s: float | None = None,
    at_s: float = 5.0,
    finish: FinishReason | None = None,
) -> None:
    output = EngineCoreOutput(key, token_ids, finish_reason=finish, draft_trace=trace)
    if queued_s is not None:
        output.events = [EngineCoreEvent(EngineCoreEventType.QUEUED, queued_s)]
    traces.observe(output, at_s, num_reqs=2, draft_budget=4)


def test_a_sequence_is_told_step_by_step(traces, tokenizer):
    ids = byte_ids(tokenizer, "abcdef")
    observe(traces, ids[:1], queued_s=2.0, at_s=3.0)
    trace = DraftTrace(ids[1:5], 3, 4, 1, [0.9, 0.8, 0.7, 0.6])
    observe(traces, [ids[1], ids[5]], trace, at_s=4.5, finish=FinishReason.STOP)
    [summary] = traces.get(now_s=10.0)
    assert (summary.key, summary.state, summary.age_s) == ("r", "stop", 8.0)
    assert (summary.first_token_s, summary.duration_s) == (1.0, 2.5)
    assert (summary.num_steps, summary.num_tokens) == (2, 3)
    assert summary.num_draft_tokens == 4
    assert summary.num_admitted_tokens == 3
    assert summary.num_accepted_tokens == 1
    detail = traces.get_detail("r", 10.0)
    assert detail.summary == summary
    first, second = detail.steps
    assert (first.tokens, first.drafts) == (["a"], [])
    assert second.tokens == ["b", "f"]
    assert second.drafts == [
        ("b", "accepted", 0.9),
        ("c", "rejected", 0.8),
        ("d", "unreached", 0.7),
        ("e", "trimmed", 0.6),
    ]
    assert (second.num_reqs, second.draft_budget) == (2, 4)


def test_forbidden_drafts_are_shown_and_not_counted(traces):
    observe(traces, [40], queued_s=1.0)
    observe(traces, [41], DraftTrace([42, 43], 2, 0, 0))
    [summary] = traces.get(2.0)
    assert (summary.num_draft_tokens, summary.num_admitted_tokens) == (0, 0)
    drafts = traces.get_detail("r", 2.0).steps[1].drafts
    assert [(fate, survival) for _, fate, survival in drafts] == [("masked", None)] * 2


def test_a_character_of_several_tokens_is_shown_at_its_last(traces, tokenizer):
    ids = byte_ids(tokenizer, "é")
    assert len(ids) == 2
    observe(traces, ids, queued_s=1.0)
    [step] = traces.get_detail("r", 1.0).steps
    assert step.tokens == ["", "é"]


def test_the_latest_are_kept_and_older_ones_do_not_come_back(traces):
    for number in range(MAX_REQUESTS + 1):
        observe(traces, [40], key=str(number), queued_s=float(number))
    observe(traces, [41], key="0")
    keys = [one.key for one in traces.get(99.0)]
    assert keys == [str(number) for number in range(MAX_REQUESTS, 0, -1)]
    assert traces.get_detail("0", 99.0) is None


def test_a_long_sequence_is_kept_to_a_bound_and_counted_to_its_end(traces):
    observe(traces, [40] * (MAX_ENTRIES - 2), queued_s=1.0)
    observe(traces, [41], DraftTrace([42, 43], 2, 2, 0))
    observe(traces, [41])
    [summary] = traces.get(1.0)
    assert summary.has_gap
    assert (summary.num_tokens, summary.num_steps) == (MAX_ENTRIES, 3)
    assert len(traces.get_detail("r", 1.0).steps) == 1


def test_who_is_ended_by_the_front_has_ended(traces):
    observe(traces, [40], key="a", queued_s=1.0)
    observe(traces, [40], key="b", queued_s=1.0, finish=FinishReason.LENGTH)
    traces.end(["a", "b", "unknown"], "abort")
    assert [one.state for one in traces.get(1.0)] == ["length", "abort"]


def test_what_the_core_says_after_the_end_is_not_heard(traces):
    observe(traces, [40], queued_s=1.0)
    traces.end(["r"], "ended")
    observe(traces, [41], finish=FinishReason.LENGTH)
    [summary] = traces.get(1.0)
    assert (summary.state, summary.num_tokens) == ("ended", 1)


def test_an_id_that_is_used_again_begins_anew(traces):
    observe(traces, [40, 41], queued_s=1.0, finish=FinishReason.STOP)
    observe(traces, [40], queued_s=2.0)
    [summary] = traces.get(3.0)
    assert (summary.state, summary.num_tokens) == ("running", 1)


def test_the_committed_tokens_are_not_those_that_are_later_changed(traces):
    token_ids = [40, 41]
    observe(traces, token_ids, queued_s=1.0)
    token_ids.clear()
    assert len(traces.get_detail("r", 1.0).steps[0].tokens) == 2


def test_a_prediction_that_is_no_number_is_null(traces):
    observe(traces, [40], DraftTrace([41], 1, 1, 0, [float("nan")]), queued_s=1.0)
    detail = msgspec.json.decode(msgspec.json.encode(traces.get_detail("r", 1.0)))
    assert detail["steps"][0]["drafts"][0][2] is None
