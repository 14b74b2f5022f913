import asyncio
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from tests.v1.engine.fakes import (
    ParrotExecutor,
    make_config,
)
from vllm.exceptions import CheckpointError, EngineDeadError, VLLMValidationError
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM

# An engine belongs to one loop, and most tests share one engine.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def engine(tokenizer_path):
    engine = make_engine(tokenizer_path)
    yield engine
    engine.shutdown()


@pytest.fixture
def doomed_engine(tokenizer_path):
    """An engine that the test may break."""
    engine = make_engine(tokenizer_path)
    yield engine
    engine.shutdown()


def make_engine(tokenizer_path):
    return AsyncLLM(make_config(tokenizer_path), executor_factory=ParrotExecutor)


async def collect(engine, request_id, prompt="abc", **params):
    params = {"max_tokens": 5, "output_kind": RequestOutputKind.DELTA} | params
    outputs = engine.generate(prompt, SamplingParams(**params), request_id)
    return [output async for output in outputs]


def endless():
    """Return parameters of an answer that nobody waits to the end of."""
    return SamplingParams(max_tokens=50, extra_args={"sleep_s": 0.1})


def text_of(outputs, index=0):
    return "".join(o.text for out in outputs for o in out.outputs if o.index == index)


async def test_many_callers_get_their_own_answers(engine):
    prompts = [f"{i:03d}" for i in range(40)]
    answers = await asyncio.gather(
        *(collect(engine, prompt, prompt, max_tokens=6) for prompt in prompts)
    )
    assert [text_of(outputs) for outputs in answers] == [p * 2 for p in prompts]


async def test_n_answers_stream_side_by_side(engine):
    outputs = await collect(engine, "a", n=3)
    assert [text_of(outputs, index) for index in range(3)] == ["abcab"] * 3
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished


async def test_a_long_prompt_is_tokenized_beside_the_loop(engine):
    outputs = await collect(engine, "a", "x" * 5000, truncate_prompt_tokens=3)
    assert len(outputs[-1].prompt_token_ids) == 3


async def test_leaving_early_aborts_in_the_core(engine):
    outputs = engine.generate("abc", endless(), "a")
    await anext(outputs)
    await outputs.aclose()
    assert not engine.output_processor.has_unfinished_requests()
    # Every block is free again.
    await engine.check_integrity()
    assert text_of(await collect(engine, "a")) == "abcab"


async def test_a_cancelled_caller_aborts(engine):
    params = {"max_tokens": 50, "extra_args": {"sleep_s": 0.05}}
    task = asyncio.create_task(collect(engine, "a", **params))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.output_processor.has_unfinished_requests()


async def test_abort_ends_the_caller_with_what_there_is(engine):
    params = {"max_tokens": 50, "extra_args": {"sleep_s": 0.02}}
    task = asyncio.create_task(collect(engine, "a", n=2, **params))
    await asyncio.sleep(0.2)
    await engine.abort("a")
    outputs = await task
    assert outputs[-1].finished
    assert {o.finish_reason for o in outputs[-1].outputs} == {"abort"}


async def test_a_bad_request_is_refused_and_the_engine_is_untouched(engine):
    with pytest.raises(VLLMValidationError) as caught:
        await collect(engine, "a", [10**6])
    assert caught.value.parameter == "prompt"
    assert text_of(await collect(engine, "a")) == "abcab"


async def test_requests_that_wait_for_a_grammar_are_woken(engine):
    regex = StructuredOutputsParams(choice=["abc"])
    outputs = await collect(engine, "a", structured_outputs=regex, max_tokens=10)
    assert outputs[-1].outputs[0].finish_reason == "stop"


async def test_a_constraint_is_checked_beside_the_loop(engine, monkeypatch):
    threads = []
    process_inputs = engine.input_processor.process_inputs

    def watch(*args, **kwargs):
        threads.append(threading.current_thread())
        return process_inputs(*args, **kwargs)

    monkeypatch.setattr(engine.input_processor, "process_inputs", watch)
    await collect(engine, "a", structured_outputs=StructuredOutputsParams(regex="abc"))
    assert threads != [threading.main_thread()]


async def test_a_grammar_that_does_not_compile_fails_only_its_request(engine):
    bad = StructuredOutputsParams(grammar='start: "a" missing_rule')
    answers = await asyncio.gather(
        collect(engine, "good"),
        collect(engine, "bad", structured_outputs=bad),
        return_exceptions=True,
    )
    assert text_of(answers[0]) == "abcab"
    assert isinstance(answers[1], VLLMValidationError)


async def test_utilities_answer_while_requests_run(engine):
    task = asyncio.create_task(collect(engine, "a", extra_args={"sleep_s": 0.02}))
    assert await engine.reset_prefix_cache() is True
    assert text_of(await task) == "abcab"


async def test_a_failing_step_fails_every_request_with_the_reason(doomed_engine):
    waiting = asyncio.create_task(doomed_engine.wait_until_dead())
    answers = await asyncio.gather(
        collect(doomed_engine, "a", max_tokens=40, extra_args={"sleep_s": 0.01}),
        collect(doomed_engine, "b", extra_args={"fail": True}),
        return_exceptions=True,
    )
    assert all(isinstance(answer, EngineDeadError) for answer in answers)
    assert "RuntimeError: the device is on fire" in str(answers[0])
    assert "on fire" in (await waiting).reason
    assert doomed_engine.errored
    with pytest.raises(EngineDeadError, match="on fire"):
        await doomed_engine.check_health()
    with pytest.raises(EngineDeadError, match="on fire"):
        await collect(doomed_engine, "c")


async def test_a_process_that_ends_fails_every_request(doomed_engine):
    answers = await asyncio.gather(
        collect(doomed_engine, "a", max_tokens=40, extra_args={"sleep_s": 0.01}),
        collect(doomed_engine, "b", extra_args={"exit": 3}),
        return_exceptions=True,
    )
    assert all(isinstance(answer, EngineDeadError) for answer in answers)
    assert "exit status 3" in str(answers[0])


async def test_a_killed_process_is_noticed_when_idle(doomed_engine):
    await doomed_engine.check_health()
    os.kill(doomed_engine._client.pid, signal.SIGKILL)
    error = await asyncio.wait_for(doomed_engine.wait_until_dead(), 5)
    assert "SIGKILL" in error.reason


async def test_shutdown_ends_waiting_requests_and_the_process(doomed_engine):
    task = asyncio.create_task(
        collect(doomed_engine, "a", max_tokens=50, extra_args={"sleep_s": 0.05})
    )
    await asyncio.sleep(0.1)
    pid = doomed_engine._client.pid
    doomed_engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_idle_engine_sleeps(engine):
    await collect(engine, "a")
    ticks = cpu_ticks(engine._client.pid)
    time.sleep(1.0)
    # A loop that spins would use about a hundred.
    assert cpu_ticks(engine._client.pid) - ticks <= 5


def cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_the_dashboard_knows_how_requests_ended(tokenizer_path):
    config = make_config(tokenizer_path)
    observability = replace(config.observability_config, enable_dashboard=True)
    engine = AsyncLLM(
        replace(config, observability_config=observability),
        executor_factory=ParrotExecutor,
    )
    try:
        await collect(engine, "length")
        await collect(engine, "stop", stop="c")
        outputs = engine.generate("abc", endless(), "left")
        await anext(outputs)
        await outputs.aclose()
        data = engine.dashboard.snapshot("length")
    finally:
        engine.shutdown()
    states = {one.key: one.state for one in data.requests}
    assert states == {"length": "length", "stop": "ended", "left": "abort"}
    assert "".join(text for s in data.request.steps for text in s.tokens) == "abcab"
    assert data.latencies["e2e"].num_values == 3


async def test_a_bad_tokenizer_is_told_before_an_engine_is_started(
    tmp_path, monkeypatch
):
    starts = []
    monkeypatch.setattr(async_llm, "AsyncMPClient", lambda *_, **__: starts.append(1))
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        make_engine(tmp_path)
    assert not starts
