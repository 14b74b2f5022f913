import threading

import pytest

from tests.v1.engine.fakes import ParrotExecutor, make_config
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore


@pytest.fixture
def wake_up():
    return threading.Event()


@pytest.fixture
def core(tokenizer_path, wake_up):
    core = EngineCore(
        make_config(tokenizer_path, num_blocks=9),
        ParrotExecutor,
        log_stats=True,
        on_wake_up=wake_up.set,
    )
    yield core
    core.shutdown()


def request(request_id, prompt=(1, 2, 3), **params):
    params = SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | params))
    return EngineCoreRequest(request_id, list(prompt), params, arrival_time=0.0)


def run(core):
    """Step to the end; return the tokens and the last output of each request."""
    tokens, last = {}, {}
    while core.can_step():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            last[output.request_id] = output
    return tokens, last


def test_requests_run_to_their_end(core):
    core.add_request(request("a"))
    core.add_request(request("b", [7, 8], max_tokens=5))
    tokens, last = run(core)
    assert tokens == {"a": [1, 2, 3], "b": [7, 8, 7, 8, 7]}
    assert last["b"].finish_reason is FinishReason.LENGTH
    assert not core.has_requests()
    core.check_integrity()


def test_a_request_that_the_scheduler_refuses_fails_alone(core):
    core.add_request(request("empty", []))
    core.add_request(request("good"))
    core.add_request(request("good", [9]))
    outputs = core.step().outputs
    refused = [o for o in outputs if o.finish_reason is FinishReason.ERROR]
    assert [o.request_id for o in refused] == ["empty", "good"]
    assert all(o.is_client_error for o in refused)
    assert refused[0].error_parameter == "prompt"


def test_a_request_that_cannot_be_read_is_not_the_clients_fault(core):
    core.add_request(EngineCoreRequest("a", None, SamplingParams(), 0.0))
    [output] = core.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert not output.is_client_error


def test_an_abort_is_reported_in_the_gauges_without_another_request(core):
    core.add_request(request("a", max_tokens=50))
    core.step()
    core.abort_requests(["a", "unknown"])
    outputs = core.step()
    assert outputs.scheduler_stats.num_running_reqs == 0
    assert outputs.scheduler_stats.kv_cache_usage == 0.0
    assert not core.can_step()
    core.check_integrity()


def test_a_request_that_waits_for_its_grammar_is_no_reason_to_step(core, wake_up):
    choice = StructuredOutputsParams(choice=["ab"])
    core.add_request(request("a", structured_outputs=choice))
    assert core.has_requests()
    assert wake_up.wait(20)
    assert core.can_step()


def test_preempted_requests_come_to_the_same_end(core):
    # Eight usable blocks for four requests of up to four blocks each.
    prompts = {str(i): [10 + i] * 20 for i in range(4)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, max_tokens=30))
    tokens, _ = run(core)
    assert tokens == {key: [10 + int(key)] * 30 for key in prompts}
    core.check_integrity()
