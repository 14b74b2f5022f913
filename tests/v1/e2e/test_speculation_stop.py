"""Where an answer ends amid several accepted tokens: as if they came one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_drafter import check_regimes, make_drafting_engine
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model, visible
from tests.v1.engine.fakes import EOS, make_tokenizer
from vllm.sampling_params import SamplingParams

PROMPT = "how it goes on"
ALPHABET = "abcdefghijklmnop"
NUM_TOKENS = 24
WRITTEN: dict[str, Any] = {"temperature": 1.0, "seed": 0, "logprobs": 1}
EOS_ID = make_tokenizer().token_to_id(EOS)
# With seven drafts, all sizes of accepted runs.
NUM_DRAFTS = 7
DRAFTERS = (
    "ngram",
    "H probabilistic",
    "M probabilistic",
    "P",
    "H probabilistic adaptive",
)
Request = tuple[str, SamplingParams]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of single characters, so that a stop can be at any of its tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("writer"), alphabet=ALPHABET)


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[TinyEngine]:
    engine = TinyEngine(model, max_num_seqs=1)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def text(alone: TinyEngine) -> str:
    """What follows the prompt if nothing stops it."""
    [output] = alone.run([(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, **WRITTEN))])
    text = output.outputs[0].text
    assert len(text) == NUM_TOKENS
    assert set(text) <= set(ALPHABET)
    return text


def make_engine(drafter: str, model: Path, folder: Path) -> TinyEngine:
    keys = {"num_speculative_tokens": NUM_DRAFTS}
    return make_drafting_engine(drafter, model, folder, ALPHABET, keys)


def make_stops(text: str) -> dict[str, dict[str, Any]]:
    """Return ways to stop near the middle of a text, each at an end of its own."""
    kept = {"include_stop_str_in_output": True}
    return {
        "one character": {"stop": text[9]},
        "three tokens": {"stop": text[10:13]},
        "three tokens, kept": {"stop": text[10:13]} | kept,
        "two strings": {"stop": [text[12:14], text[10:13]]},
        "two strings, kept": {"stop": [text[12:14], text[10:13]]} | kept,
        "not before a minimum": {"stop": text[3], "min_tokens": 8},
        "a token": {"stop_token_ids": [make_tokenizer().token_to_id(text[9])]},
        "never": {"stop": "zzz"},
    }


@pytest.fixture(scope="module")
def stopped(text: str) -> list[Request]:
    """Requests for all lengths up to one past the last stop."""
    return [
        (PROMPT, SamplingParams(max_tokens=max_tokens, **WRITTEN, **stop))
        for stop in make_stops(text).values()
        for max_tokens in range(stop.get("min_tokens", 1), NUM_TOKENS - 2)
    ]


@pytest.fixture(scope="module")
def expected(alone: TinyEngine, stopped: list[Request]) -> list[dict[str, Any]]:
    return [visible(output) for output in alone.run(stopped)]


@bit_for_bit
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_cuts_text_tokens_and_scores_at_one_place(
    model: Path,
    tmp_path: Path,
    text: str,
    stopped: list[Request],
    expected: list[dict[str, Any]],
    drafter: str,
):
    engine = make_engine(drafter, model, tmp_path)
    outputs = engine.run(stopped)
    accepted = engine.executor.accepted
    check_regimes(engine)
    engine.shutdown()
    assert list(map(visible, outputs)) == expected
    for (_, params), output in zip(stopped, outputs, strict=True):
        [answer] = output.outputs
        assert len(answer.token_ids) == len(answer.logprobs) <= params.max_tokens
        assert text.startswith(answer.text)
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == params.max_tokens
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert min(reasons.count("stop"), reasons.count("length")) > len(stopped) / 8
    if drafter == "H probabilistic":
        # Stops and lengths lie amid accepted runs.
        assert accepted[NUM_DRAFTS] > len(stopped) / 2


@bit_for_bit
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_deltas_of_several_tokens_add_up_to_the_answer(
    model: Path, tmp_path: Path, alone: TinyEngine, text: str, drafter: str
):
    requests = [
        (PROMPT, SamplingParams(max_tokens=max_tokens, n=2, **WRITTEN, **stop))
        for stop in make_stops(text).values()
        for max_tokens in (9, 12, NUM_TOKENS)
    ]
    engine = make_engine(drafter, model, tmp_path)
    streams = engine.stream(requests)
    engine.shutdown()
    for deltas, whole in zip(streams, alone.run(requests), strict=True):
        for answer in whole.outputs:
            parts = [one for one in deltas if one.index == answer.index]
            assert "".join(part.text for part in parts) == answer.text
            assert sum((part.token_ids for part in parts), []) == answer.token_ids
            assert sum((part.logprobs for part in parts), []) == answer.logprobs
            reasons = [part.finish_reason for part in parts]
            assert reasons == [None] * (len(parts) - 1) + [answer.finish_reason]
    if drafter == "H probabilistic":
        longest = max(len(one.token_ids) for deltas in streams for one in deltas)
        assert longest == NUM_DRAFTS + 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_min_tokens_counts_tokens_and_not_steps(
    model: Path, tmp_path: Path, drafter: str
):
    requests = [
        (
            PROMPT,
            SamplingParams(
                max_tokens=20,
                min_tokens=number,
                logit_bias={EOS_ID: 100.0},
                **sampled,
            ),
        )
        for number in range(12)
        for sampled in ({"temperature": 0.0}, {"seed": 1}, {})
    ]
    engine = make_engine(drafter, model, tmp_path)
    outputs = engine.run(requests)
    engine.shutdown()
    for (_, params), output in zip(requests, outputs, strict=True):
        [answer] = output.outputs
        assert len(answer.token_ids) == params.min_tokens + 1
        assert answer.token_ids.index(EOS_ID) == params.min_tokens
        assert answer.finish_reason == "stop"


@bit_for_bit
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_last_token_stands_where_the_context_ends(
    model: Path, tmp_path: Path, alone: TinyEngine, drafter: str
):
    # Whole blocks, so that none has room for what is drafted behind the end.
    max_model_len = 32
    keys = {"num_speculative_tokens": NUM_DRAFTS}
    engine = make_drafting_engine(
        drafter, model, tmp_path, ALPHABET, keys, max_model_len=max_model_len
    )
    params = SamplingParams(max_tokens=max_model_len - len(PROMPT), **WRITTEN)
    [output] = engine.run([(PROMPT, params)])
    engine.shutdown()
    [expected] = alone.run([(PROMPT, params)])
    assert visible(output) == visible(expected)
    assert len(output.prompt_token_ids) == len(PROMPT)
