import numpy as np
import pytest

from tests.v1.engine.test_detokenizer import byte_ids
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.seeds import derive_seed
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineGenerateError, EngineOverloadedError
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer, log_stats=True)


def add(processor, request_id="r", collector=None, prompt=(1, 2), **params):
    params = SamplingParams(**({"max_tokens": 10} | params))
    request = EngineCoreRequest(request_id, list(prompt), params, arrival_time=0.0)
    return processor.add_request(request, None, collector)


def logprobs_for(token_ids):
    ids = np.array(token_ids).reshape(-1, 1)
    return LogprobsLists(ids, np.full(ids.shape, -1.0, np.float32), ids[:, 0] * 0 + 1)


def step(processor, request_id, token_ids, finish=None, **fields):
    output = EngineCoreOutput(request_id, list(token_ids), **fields)
    output.finish_reason = finish
    output.new_logprobs = logprobs_for(token_ids)
    return processor.process_outputs([output], 1.0, IterationStats())


def test_a_stop_inside_several_tokens_cuts_ids_and_logprobs(processor, tokenizer):
    add(processor, stop="c", logprobs=0)
    result = step(processor, "r", byte_ids(tokenizer, "abcdef"))
    [output] = result.request_outputs
    completion = output.outputs[0]
    assert completion.text == "ab"
    assert completion.token_ids == byte_ids(tokenizer, "abc")
    assert len(completion.logprobs) == 3
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "c")
    assert result.reqs_to_abort == ["r"]


def test_a_stop_string_before_the_length_limit_wins(processor, tokenizer):
    add(processor, stop="c")
    tokens = byte_ids(tokenizer, "abcd")
    result = step(processor, "r", tokens, FinishReason.LENGTH)
    assert result.request_outputs[0].outputs[0].finish_reason == "stop"
    # The core has ended it by itself.
    assert result.reqs_to_abort == []


def test_the_last_token_of_a_closed_grammar_is_text_and_a_stop_token_is_not(
    processor, tokenizer
):
    tokens = byte_ids(tokenizer, "ab")
    texts = []
    for request_id, eos_token_id in (("grammar", 0), ("stop", tokens[-1])):
        add(processor, request_id, eos_token_id=eos_token_id)
        result = step(processor, request_id, tokens, FinishReason.STOP)
        completion = result.request_outputs[0].outputs[0]
        assert completion.token_ids == tokens
        texts.append(completion.text)
    assert texts == ["ab", "a"]


def test_one_token_a_step_and_many_give_the_same(processor, tokenizer):
    tokens = byte_ids(tokenizer, "a☺ END b")
    for request_id, size in (("one", 1), ("many", 4)):
        add(processor, request_id, stop="END", logprobs=0, max_tokens=50)
        for start in range(0, len(tokens), size):
            result = step(processor, request_id, tokens[start : start + size])
            if result.reqs_to_abort:
                break
        completion = result.request_outputs[-1].outputs[0]
        assert completion.text == "a☺ "
        assert len(completion.token_ids) == len(completion.logprobs) == 8


def test_final_only_says_nothing_before_the_end(processor):
    add(processor, output_kind=RequestOutputKind.FINAL_ONLY)
    assert step(processor, "r", [40]).request_outputs == []
    [output] = step(processor, "r", [41], FinishReason.LENGTH).request_outputs
    assert output.outputs[0].token_ids == [40, 41]


def test_deltas_hold_only_what_is_new(processor, tokenizer):
    add(processor, output_kind=RequestOutputKind.DELTA, logprobs=0)
    a, b = byte_ids(tokenizer, "ab")
    step(processor, "r", [a])
    [output] = step(processor, "r", [b], FinishReason.LENGTH).request_outputs
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("b", [b])
    assert len(completion.logprobs) == 1
    assert completion.cumulative_logprob == -2.0


def test_outputs_of_aborted_requests_are_dropped(processor):
    add(processor)
    assert processor.abort_requests(["r"]) == ["r"]
    assert step(processor, "r", [40]).request_outputs == []
    assert not processor.has_unfinished_requests()


def test_aborting_a_parent_stops_every_child(processor):
    children = add(processor, n=3)
    stopped = processor.abort_requests(["r"])
    assert stopped == [child.request_id for child in children]
    assert processor.parent_requests == {}


def test_a_clients_error_carries_the_field(processor):
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    add(processor, collector=collector)
    step(
        processor,
        "r",
        [],
        FinishReason.ERROR,
        error="the schema is wrong",
        error_parameter="structured_outputs.json",
        is_client_error=True,
    )
    with pytest.raises(VLLMValidationError, match="schema") as caught:
        collector.get_nowait()
    assert caught.value.parameter == "structured_outputs.json"


def test_an_error_of_one_child_ends_its_siblings(processor):
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    first, second = add(processor, collector=collector, n=2)
    result = step(processor, first.request_id, [], FinishReason.ERROR, error="NaN")
    assert result.reqs_to_abort == [second.request_id]
    with pytest.raises(EngineGenerateError, match="NaN"):
        collector.get_nowait()


def test_an_engine_without_room_is_told_from_one_that_failed(processor):
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    add(processor, collector=collector)
    step(processor, "r", [], FinishReason.ERROR, error="busy", is_overload=True)
    with pytest.raises(EngineOverloadedError, match="busy"):
        collector.get_nowait()


def test_a_token_that_cannot_be_read_fails_only_its_request(processor, tokenizer):
    good, bad = (RequestOutputCollector(RequestOutputKind.DELTA) for _ in range(2))
    add(processor, "bad", bad)
    add(processor, "good", good)
    outputs = [
        EngineCoreOutput("bad", [-1]),
        EngineCoreOutput("good", byte_ids(tokenizer, "a")),
    ]
    result = processor.process_outputs(outputs)
    assert good.get_nowait().outputs[0].text == "a"
    assert result.reqs_to_abort == ["bad"]
    with pytest.raises(EngineGenerateError):
        bad.get_nowait()


def test_a_dead_engine_ends_every_caller(processor):
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    add(processor, collector=collector)
    processor.propagate_error(EngineDeadError("fire"))
    with pytest.raises(EngineDeadError, match="fire"):
        collector.get_nowait()
    assert not processor.has_unfinished_requests()


def test_cached_tokens_of_n_answers_are_those_of_the_first(processor):
    first, second = add(processor, n=2)
    step(processor, first.request_id, [40], num_cached_tokens=0)
    result = step(processor, second.request_id, [40], num_cached_tokens=16)
    assert result.request_outputs[0].num_cached_tokens == 0


def test_cumulative_outputs_show_every_child(processor):
    first, second = add(processor, n=2)
    step(processor, second.request_id, [40])
    [output] = step(processor, first.request_id, [41]).request_outputs
    assert [(o.index, o.token_ids) for o in output.outputs] == [(0, [41]), (1, [40])]


def test_a_parent_ends_with_its_last_child(processor):
    children = add(processor, n=2, output_kind=RequestOutputKind.DELTA)
    finished = [
        step(processor, child.request_id, [40], FinishReason.LENGTH)
        .request_outputs[0]
        .finished
        for child in children
    ]
    assert finished == [False, True]


def test_prompt_logprobs_come_once_in_deltas(processor):
    add(processor, output_kind=RequestOutputKind.DELTA, prompt_logprobs=0)
    rows = logprobs_for([2])
    first = step(processor, "r", [40], new_prompt_logprobs=rows).request_outputs[0]
    second = step(processor, "r", [41]).request_outputs[0]
    assert len(first.prompt_logprobs) == 2
    assert second.prompt_logprobs is None


def test_children_have_seeds_of_their_own_and_the_first_keeps_the_seed():
    params = SamplingParams(n=3, seed=5)
    parent = ParentRequest("r", params)
    request = EngineCoreRequest("r", [1], params, arrival_time=0.0)
    children = parent.make_children(request)
    seeds = [child.sampling_params.seed for child in children]
    assert seeds == [5, derive_seed(5, 1), derive_seed(5, 2)]
    assert len(set(seeds)) == 3
    assert {child.parent_request_id for child in children} == {"r"}
    assert {child.sampling_params.n for child in children} == {1}


def test_children_of_an_unseeded_request_have_no_seed():
    params = SamplingParams(n=2)
    parent = ParentRequest("r", params)
    children = parent.make_children(EngineCoreRequest("r", [1], params, 0.0))
    assert [child.sampling_params.seed for child in children] == [None, None]


def delta(index, text, finish_reason=None):
    completion = CompletionOutput(
        index, text, [len(text)], logprobs=[{}], finish_reason=finish_reason
    )
    return RequestOutput("r", None, [1], None, [completion], finish_reason is not None)


def test_a_slow_caller_loses_no_delta():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    for output in (delta(1, "x"), delta(0, "a"), delta(0, "bc", "stop")):
        collector.put(output)
    merged = collector.get_nowait()
    assert [(o.index, o.text) for o in merged.outputs] == [(0, "abc"), (1, "x")]
    assert merged.outputs[0].token_ids == [1, 2]
    assert len(merged.outputs[0].logprobs) == 2
    assert merged.outputs[0].finish_reason == "stop"
    assert merged.finished
    assert collector.get_nowait() is None


def test_a_slow_caller_sees_the_latest_cumulative_output():
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE)
    collector.put(delta(0, "a"))
    collector.put(delta(0, "ab"))
    assert collector.get_nowait().outputs[0].text == "ab"


def test_an_error_is_not_overwritten():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    collector.put(EngineDeadError("fire"))
    collector.put(delta(0, "a"))
    with pytest.raises(EngineDeadError):
        collector.get_nowait()


def test_times_of_a_request_are_measured_from_its_arrival(processor):
    add(processor)
    stats = IterationStats(now=2.5)
    processor.process_outputs([EngineCoreOutput("r", [40])], 10.0, stats)
    assert stats.time_to_first_tokens == [2.5]
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (2, 1)
    stats = IterationStats(now=3.0)
    last = EngineCoreOutput("r", [41], finish_reason=FinishReason.LENGTH)
    processor.process_outputs([last], 10.25, stats)
    assert stats.inter_token_latencies == [0.25]
    [finished] = stats.finished_requests
    assert (finished.e2e_latency, finished.decode_time) == (3.0, 0.25)
    assert finished.num_generation_tokens == 2


def test_a_prompt_that_is_only_scored_is_counted(processor):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    request = EngineCoreRequest("r", [1, 2, 3], params, arrival_time=0.0)
    processor.add_request(request, None, drops_output=True)
    stats = IterationStats()
    last = EngineCoreOutput("r", [40], finish_reason=FinishReason.LENGTH)
    processor.process_outputs([last], 1.0, stats)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (3, 0)
    assert stats.time_to_first_tokens == []
    assert stats.finished_requests[0].max_tokens_param == 0
