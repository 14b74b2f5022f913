"""What the front keeps for the `metrics` of a request."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.v1.engine.fakes import make_config
from tests.v1.engine.test_detokenizer import byte_ids
from vllm.config import ObservabilityConfig, SpeculativeConfig
from vllm.outputs import RequestOutput, SpecDecodeMetrics
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.spec_decode.metrics import SpecDecodingStep


def make_processor(
    tokenizer: Tokenizer, level: str = "detailed", num_drafts: int = 3
) -> OutputProcessor:
    return OutputProcessor(
        tokenizer,
        log_stats=False,
        num_spec_tokens=num_drafts,
        spec_decode_metrics_level=level,
    )


def add(processor: OutputProcessor, collector=None, **params) -> list[str]:
    request = EngineCoreRequest("r", [1, 2], SamplingParams(**params), 0.0)
    return [one.request_id for one in processor.add_request(request, None, collector)]


def step(
    processor: OutputProcessor,
    token_ids: list[int],
    drafts: tuple[int, int] | None = None,
    finish: FinishReason | None = None,
    request_id: str = "r",
) -> list[RequestOutput]:
    output = EngineCoreOutput(request_id, token_ids, finish_reason=finish)
    if drafts is not None:
        output.spec_decoding_step = SpecDecodingStep(*drafts)
    return processor.process_outputs([output]).request_outputs


def test_an_answer_and_its_request_tell_of_the_steps_so_far(tokenizer):
    processor = make_processor(tokenizer)
    add(processor)
    step(processor, [40])
    step(processor, [41, 42], (3, 1))
    [output] = step(processor, [43], (2, 0), FinishReason.LENGTH)
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics == SpecDecodeMetrics(
        3, {3: [0, 1, 0, 0], 2: [1, 0, 0]}, [1, 0], [3, 2]
    )
    assert output.metrics.spec_decode_metrics == metrics


def test_drafts_behind_a_stop_string_were_accepted_all_the_same(tokenizer):
    processor = make_processor(tokenizer)
    add(processor, stop="c")
    [output] = step(processor, byte_ids(tokenizer, "abcd"), (3, 3))
    assert len(output.outputs[0].token_ids) == 3
    assert output.metrics.spec_decode_metrics.acceptance_histogram == [0, 0, 0, 1]


def test_an_aborted_request_tells_what_there_is(tokenizer):
    processor = make_processor(tokenizer)
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY)
    add(processor, collector, output_kind=RequestOutputKind.FINAL_ONLY)
    step(processor, [40, 41], (3, 1))
    processor.abort_requests(["r"])
    output = collector.get_nowait()
    assert output.outputs[0].finish_reason == "abort"
    assert output.metrics.spec_decode_metrics.per_step_accepted == [1]


def test_each_of_several_answers_tells_of_itself_and_the_request_of_none(tokenizer):
    processor = make_processor(tokenizer)
    kind = RequestOutputKind.FINAL_ONLY
    first, second = add(processor, n=2, output_kind=kind)
    end = FinishReason.LENGTH
    step(processor, [40, 41], (3, 1), end, first)
    [output] = step(processor, [40], (1, 0), end, second)
    steps = [one.spec_decode_metrics.per_step_drafted for one in output.outputs]
    assert steps == [[3], [1]]
    assert output.metrics.spec_decode_metrics is None


def test_joined_deltas_tell_of_all_their_steps(tokenizer):
    processor = make_processor(tokenizer)
    collector = RequestOutputCollector(RequestOutputKind.DELTA)
    add(processor, collector, output_kind=RequestOutputKind.DELTA)
    step(processor, [40, 41], (3, 1))
    step(processor, [42, 43, 44], (3, 2))
    output = collector.get_nowait()
    assert output.outputs[0].token_ids == [40, 41, 42, 43, 44]
    assert output.outputs[0].spec_decode_metrics.per_step_accepted == [1, 2]


@pytest.mark.parametrize(("level", "num_drafts"), [("none", 3), ("summary", 0)])
def test_nothing_is_kept_unasked_or_without_a_drafter(tokenizer, level, num_drafts):
    processor = make_processor(tokenizer, level, num_drafts)
    add(processor)
    [output] = step(processor, [40], None, FinishReason.LENGTH)
    assert output.outputs[0].spec_decode_metrics is None
    assert output.metrics.spec_decode_metrics is None


@pytest.mark.parametrize("level", ["summary", "detailed"])
def test_the_configuration_decides_what_is_kept(tokenizer, level):
    config = replace(
        make_config(Path("/nowhere")),
        speculative_config=SpeculativeConfig("ngram", 2),
        observability_config=ObservabilityConfig(per_request_spec_decode_metrics=level),
    )
    processor = OutputProcessor.from_config(tokenizer, config, log_stats=False)
    add(processor)
    [output] = step(processor, [40, 41], (2, 1), FinishReason.LENGTH)
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics.acceptance_histogram == [0, 1, 0]
    assert metrics.per_step_accepted == ([1] if level == "detailed" else None)


@pytest.mark.parametrize("tells_times", [True, False])
def test_times_are_taken_for_answers_also_without_statistics(tokenizer, tells_times):
    config = replace(
        make_config(Path("/nowhere")),
        observability_config=ObservabilityConfig(
            disable_log_stats=True, enable_per_request_metrics=tells_times
        ),
    )
    processor = OutputProcessor.from_config(tokenizer, config, log_stats=False)
    assert (processor.make_iteration_stats() is not None) == tells_times
