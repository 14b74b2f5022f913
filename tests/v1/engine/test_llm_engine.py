import pytest

from tests.v1.engine.fakes import ParrotExecutor, make_config
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine.llm_engine import LLMEngine


@pytest.fixture
def engine(tokenizer_path):
    engine = LLMEngine(
        make_config(tokenizer_path), log_stats=True, executor_factory=ParrotExecutor
    )
    yield engine
    engine.shutdown()


def run(engine, kind=None):
    """Step to the end; return all outputs in order."""
    outputs = []
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine does not come to an end")


def final(outputs, request_id):
    [output] = [o for o in outputs if o.request_id == request_id and o.finished]
    return output


def test_text_comes_back_from_text(engine):
    engine.add_request("a", "hello", SamplingParams(max_tokens=4))
    output = final(run(engine), "a")
    assert output.outputs[0].text == "hellohello"
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt == "hello"
    # "hell" and "o", twice.
    assert len(output.outputs[0].token_ids) == 4


def test_deltas_join_to_the_final_text_and_tokens(engine):
    params = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA)
    engine.add_request("delta", "Zoë ☺!", params)
    engine.add_request("final", "Zoë ☺!", SamplingParams(max_tokens=9))
    outputs = run(engine)
    deltas = [o.outputs[0] for o in outputs if o.request_id == "delta"]
    whole = final(outputs, "final").outputs[0]
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids


def test_a_stop_string_ends_the_request_in_the_core_too(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=50, stop="ca"))
    output = final(run(engine), "a").outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (
        "ab",
        "stop",
        "ca",
    )
    assert len(output.token_ids) == 4
    assert engine.step() == []


def test_n_answers_come_in_index_order_and_count_once(engine):
    params = SamplingParams(n=3, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("a", "abcd", params)
    [output] = run(engine)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert [o.text for o in output.outputs] == ["abcd"] * 3
    assert output.finished


def test_logprobs_have_one_entry_a_token(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=5, logprobs=1))
    output = final(run(engine), "a").outputs[0]
    assert len(output.logprobs) == len(output.token_ids) == 5
    # The batch has two candidates a row; the request asked for one.
    assert [len(position) for position in output.logprobs] == [2] * 5
    assert output.cumulative_logprob == pytest.approx(-2.5)


def test_zero_max_tokens_scores_the_prompt_and_says_nothing(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=0, logprobs=1))
    output = final(run(engine), "a").outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == ("", [], [])
    assert output.finish_reason == "length"


def test_a_grammar_that_does_not_compile_is_the_clients_error(engine):
    # Passes the front's check of form, but no JSON value can match it.
    grammar = StructuredOutputsParams(grammar='start: "a" missing_rule')
    engine.add_request("good", "abc", SamplingParams(max_tokens=3))
    engine.add_request(
        "bad", "abc", SamplingParams(max_tokens=3, structured_outputs=grammar)
    )
    outputs, errors = [], []
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except VLLMValidationError as error:
            errors.append(error)
    [error] = errors
    assert error.parameter is not None
    assert final(outputs, "good").outputs[0].text == "abc"


def test_an_aborted_request_says_no_more(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=50))
    engine.add_request("b", "abc", SamplingParams(max_tokens=3))
    engine.step()
    engine.abort_request("a")
    assert {output.request_id for output in run(engine)} == {"b"}


def test_a_request_id_in_use_is_refused(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=3))
    with pytest.raises(VLLMValidationError, match="in use") as caught:
        engine.add_request("a", "abc", SamplingParams(max_tokens=3))
    assert caught.value.parameter == "request_id"
    assert final(run(engine), "a").outputs[0].text == "abc"


def test_metrics_count_what_happened(engine):
    engine.add_request("a", "abc", SamplingParams(max_tokens=5))
    run(engine)
    values = {m.name: m for m in engine.get_metrics() if hasattr(m, "value")}
    assert values["vllm:prompt_tokens"].value == 3
    assert values["vllm:generation_tokens"].value == 5
    histograms = {m.name: m for m in engine.get_metrics() if hasattr(m, "buckets")}
    assert histograms["vllm:time_to_first_token_seconds"].count == 1
    assert histograms["vllm:inter_token_latency_seconds"].count == 4


def test_metrics_need_statistics(tokenizer_path):
    engine = LLMEngine(make_config(tokenizer_path), executor_factory=ParrotExecutor)
    with pytest.raises(VLLMValidationError, match="disable_log_stats"):
        engine.get_metrics()
    engine.shutdown()


def test_the_core_may_run_in_a_process_of_its_own(tokenizer_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = LLMEngine(make_config(tokenizer_path), executor_factory=ParrotExecutor)
    try:
        engine.add_request("a", "abc", SamplingParams(max_tokens=5))
        assert engine.reset_prefix_cache() is True
        assert final(run(engine), "a").outputs[0].text == "abcab"
    finally:
        engine.shutdown()
