"""A drafter that equals its target: every number of an answer's metrics is known."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.test_feature_matrix import GROWING, TINY_POOL
from tests.v1.e2e.tiny_engine import TinyEngine
from vllm.outputs import RequestOutput, SpecDecodeMetrics
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = bit_for_bit

NUM_DRAFTS = 3


def make_engine(model: Path, method: str = "greedy", **kwargs: Any) -> TinyEngine:
    defaults = {
        "speculative_config": {
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": NUM_DRAFTS,
            "draft_sample_method": method,
        },
        "per_request_spec_decode_metrics": "detailed",
        "enable_per_request_metrics": True,
    }
    return TinyEngine(model, **(defaults | kwargs))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[TinyEngine]:
    running = make_engine(model)
    yield running
    running.shutdown()


def run(engine: TinyEngine, prompt: str = "hello", **params: Any) -> RequestOutput:
    defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    [output] = engine.run([(prompt, SamplingParams(**(defaults | params)))])
    return output


def drafts_of(output: RequestOutput) -> SpecDecodeMetrics:
    assert output.metrics is not None
    metrics = output.metrics.spec_decode_metrics
    assert metrics is not None
    return metrics


# 12 tokens: the first without drafts, twice four, and three with what still has room.
FULL = SpecDecodeMetrics(
    NUM_DRAFTS, {3: [0, 0, 0, 2], 2: [0, 0, 1]}, [3, 3, 2], [3, 3, 2]
)


def test_every_draft_of_the_target_itself_is_accepted(engine: TinyEngine):
    metrics = drafts_of(run(engine))
    assert metrics == FULL
    assert metrics.draft_acceptance_rate == 1.0
    assert metrics.mean_acceptance_length == 1 + 8 / 3


def test_so_is_every_draft_that_is_drawn_with_the_request_s_seed(model: Path):
    engine = make_engine(model, "probabilistic")
    metrics = drafts_of(run(engine, temperature=1.0, seed=3))
    engine.shutdown()
    assert metrics == FULL


@pytest.mark.parametrize(
    ("cap", "per_step"), [(0, []), (1, [1] * 5), (2, [2, 2, 2, 1]), (9, [3, 3, 2])]
)
def test_the_cap_of_a_request_bounds_its_drafts(
    engine: TinyEngine, cap: int, per_step: list[int]
):
    metrics = drafts_of(run(engine, num_speculative_tokens=cap))
    assert metrics.per_step_drafted == metrics.per_step_accepted == per_step
    assert len(metrics.acceptance_histogram) == NUM_DRAFTS + 1


def test_no_draft_is_read_from_where_the_drafter_has_no_place(model: Path):
    config = {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": NUM_DRAFTS,
        "max_model_len": 10,
    }
    engine = make_engine(model, speculative_config=config)
    output = run(engine)
    engine.shutdown()
    # Two prompt tokens and one of output, then twice four: the last known one is the
    # eleventh.
    assert drafts_of(output).per_step_drafted == [3, 3]
    assert drafts_of(output).draft_acceptance_rate == 1.0


def test_drafts_behind_a_stop_string_were_accepted_all_the_same(engine: TinyEngine):
    # Its second token is the first draft.
    text = run(engine, "x").outputs[0].text
    output = run(engine, "x", stop=text[1])
    assert output.outputs[0].text == text[0]
    assert len(output.outputs[0].token_ids) == 2
    assert drafts_of(output).per_step_accepted == [3]


def test_drafts_behind_a_stop_token_were_accepted_all_the_same(engine: TinyEngine):
    token_ids = run(engine).outputs[0].token_ids
    output = run(engine, stop_token_ids=[token_ids[1]])
    assert output.outputs[0].token_ids == token_ids[:2]
    assert drafts_of(output).per_step_accepted == [3]


def test_each_of_several_answers_tells_of_itself(engine: TinyEngine):
    output = run(engine, n=2)
    assert [one.spec_decode_metrics for one in output.outputs] == [FULL, FULL]
    assert output.metrics is not None
    assert output.metrics.spec_decode_metrics is None


def test_times_are_told_without_statistics(engine: TinyEngine):
    stats = run(engine).metrics
    assert stats is not None
    assert stats.num_generation_tokens == 12
    assert 0 < stats.queued_ts <= stats.scheduled_ts < stats.first_token_ts
    assert stats.first_token_ts < stats.last_token_ts
    assert stats.first_token_latency > 0


def test_preempted_requests_tell_of_each_step_once(model: Path):
    engine = make_engine(model, **TINY_POOL)
    outputs = engine.run([GROWING] * 5)
    engine.shutdown()
    assert engine.executor.resumed
    for output in outputs:
        metrics = drafts_of(output)
        assert metrics.per_step_accepted == metrics.per_step_drafted
        num_tokens = len(output.outputs[0].token_ids)
        num_with_drafts = metrics.num_spec_steps + metrics.num_accepted_draft_tokens
        # The first token came without drafts, and so did the first after each return.
        assert num_tokens // 2 < num_with_drafts < num_tokens
        assert metrics.draft_acceptance_rate == 1.0


def test_drafts_are_written_where_no_other_request_has_its_own(model: Path):
    # 13 tokens of prompt, then three a step: all of them fill a block at the same time.
    engine = make_engine(model, enable_prefix_caching=False)
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, num_speculative_tokens=2
    )
    prompts = [[number, *range(number * 9, number * 9 + 12)] for number in range(8)]
    for _ in range(2):
        for output in engine.run([(prompt, params) for prompt in prompts]):
            assert drafts_of(output).draft_acceptance_rate == 1.0
        # Rows are used again by others.
        prompts.reverse()
    engine.shutdown()


def test_drafts_that_a_grammar_forbids_are_not_counted(model: Path):
    config = {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
    }
    engine = make_engine(model, speculative_config=config)
    # Behind a the prompt says b and c, and the grammar only b.
    literal = StructuredOutputsParams(regex="abbab")
    metrics = drafts_of(run(engine, "abcabc", structured_outputs=literal))
    plain = drafts_of(run(engine, "abcabc"))
    engine.shutdown()
    assert metrics.per_step_drafted == metrics.per_step_accepted
    assert metrics.draft_acceptance_rate == 1.0
    assert 0 < metrics.num_draft_tokens < NUM_DRAFTS * metrics.num_spec_steps
    assert plain.num_accepted_draft_tokens < plain.num_draft_tokens
