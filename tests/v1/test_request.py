import sys

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest
from vllm.v1.request import Request, RequestStatus


def test_the_message_is_taken_over():
    message = EngineCoreRequest("a", [1, 2], SamplingParams(), 3.0, 4, "salt", "parent")
    request = Request.from_engine_core_request(message, None)
    assert (request.request_id, request.prompt_token_ids) == ("a", [1, 2])
    assert (request.arrival_time, request.priority) == (3.0, 4)
    assert (request.cache_salt, request.parent_request_id) == ("salt", "parent")


def test_all_tokens_are_the_prompt_and_the_output():
    request = Request("a", [1, 2], SamplingParams())
    request.append_output_token_ids([3])
    request.spec_token_ids = [4, 5]
    assert request.all_token_ids == [1, 2, 3]
    assert request.prompt_token_ids == [1, 2]
    assert (request.num_tokens, request.num_tokens_with_spec) == (3, 5)


@pytest.mark.parametrize(("max_tokens", "total"), [(0, 2), (5, 7), (None, sys.maxsize)])
def test_max_tokens_bounds_the_total(max_tokens, total):
    assert Request(
        "a", [1, 2], SamplingParams(max_tokens=max_tokens)
    ).max_total_tokens == (total)


def test_events_are_given_once():
    request = Request("a", [1], SamplingParams())
    assert request.take_events() is None
    request.events.append(EngineCoreEvent.now(EngineCoreEventType.QUEUED))
    assert [event.type for event in request.take_events()] == [
        EngineCoreEventType.QUEUED
    ]
    assert request.take_events() is None


def test_the_finished_statuses_are_those_without_another_step():
    assert [status.name for status in RequestStatus if not status.is_finished] == [
        "WAITING",
        "WAITING_FOR_GRAMMAR",
        "RUNNING",
        "PREEMPTED",
    ]
