"""Grammars under drafts: nothing forbidden is said, and what is complete ends."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_drafter import KINDS, check_regimes, make_drafting_engine
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from tests.v1.engine.fakes import EOS, make_tokenizer
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_llguidance
from vllm.v1.structured_output.grammar_spec import MAX_WHITESPACE

TOKENIZER = make_tokenizer()
EOS_ID = TOKENIZER.token_to_id(EOS)
ROWS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {
            "id": {"enum": [1, 22, 333]},
            "ok": {"type": "boolean"},
            "tag": {"enum": ["x", "yy"]},
        },
        "required": ["id", "ok", "tag"],
        "additionalProperties": False,
    },
}


def make_engine(
    drafter: str,
    model: Path,
    folder: Path,
    num_drafts: int | None = None,
    **kwargs: Any,
) -> TinyEngine:
    """Return an engine with a drafter, at K = num_drafts if it can draft so many."""
    keys = {}
    if num_drafts is not None and not drafter.startswith("d"):
        keys["num_speculative_tokens"] = num_drafts
    return make_drafting_engine(drafter, model, folder, keys=keys, **kwargs)


def constrained(max_tokens: int = 100, **params: Any) -> SamplingParams:
    names = ("json", "regex", "choice", "grammar", "disable_any_whitespace")
    constraint = {name: params.pop(name) for name in names if name in params}
    params["structured_outputs"] = StructuredOutputsParams(**constraint)
    return SamplingParams(max_tokens=max_tokens, **params)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def literal(number: int) -> str:
    return f"id{number:02d}-" + "".join(
        chr(97 + (number * 7 + i * i) % 26) for i in range(75)
    )


def tempting(number: int) -> str:
    """Return a prompt that begins like a literal and goes on as it must not."""
    return f"{literal(number)[:9]}{literal(number + 1)[9:20]} "


HOT = {"temperature": 1.5}
PLAIN = SamplingParams(temperature=0.0, max_tokens=20)


TEMPTED = [(tempting(number), PLAIN) for number in range(6)]


def run_plain(
    model: Path, requests: list[tuple[str, SamplingParams]], **kwargs: Any
) -> list[dict[str, Any]]:
    """Return what is seen of the answers of an engine without drafts."""
    engine = TinyEngine(model, **kwargs)
    outputs = engine.run(requests)
    engine.shutdown()
    return list(map(visible, outputs))


@pytest.fixture(scope="module")
def plain_alone(model: Path) -> list[dict[str, Any]]:
    """What the requests without a grammar say one after another, without drafts."""
    return run_plain(model, TEMPTED, max_num_seqs=1)


@pytest.mark.parametrize("max_num_seqs", [1, 18])
@pytest.mark.parametrize("drafter", KINDS)
def test_a_literal_is_said_byte_for_byte_beside_any_neighbours(
    model: Path,
    plain_alone: list[dict[str, Any]],
    tmp_path: Path,
    drafter: str,
    max_num_seqs: int,
):
    """O5 and O6: the one legal answer, and greedy neighbours as if alone."""
    numbers = range(len(TEMPTED))
    literals = [
        (tempting(number), constrained(regex=re.escape(literal(number)), **HOT))
        for number in numbers
    ]
    schemas = [
        (f"{number} rows", constrained(json=ROWS, disable_any_whitespace=True, **HOT))
        for number in numbers
    ]
    engine = make_engine(drafter, model, tmp_path, max_num_seqs=max_num_seqs)
    mixed = [
        one for three in zip(TEMPTED, literals, schemas, strict=True) for one in three
    ]
    outputs = engine.run(mixed)
    accepted = engine.executor.accepted
    check_regimes(engine)
    engine.shutdown()
    assert [visible(output) for output in outputs[::3]] == plain_alone
    assert [text_of(output) for output in outputs[1::3]] == [*map(literal, numbers)]
    for output in outputs[2::3]:
        jsonschema.validate(json.loads(text_of(output)), ROWS)
    ends = outputs[1::3] + outputs[2::3]
    assert {output.outputs[0].finish_reason for output in ends} == {"stop"}
    # The grammars have refused drafts.
    assert accepted[0] > 0


@pytest.mark.parametrize("drafter", KINDS)
def test_schema_requests_in_a_row_all_end_with_their_grammar(
    model: Path, tmp_path: Path, drafter: str
):
    engine = make_engine(drafter, model, tmp_path, num_drafts=15, max_num_seqs=2)
    compact = constrained(json=ROWS, disable_any_whitespace=True, **HOT)
    # As many as a run of too much whitespace needs, and more.
    spaced = constrained(MAX_WHITESPACE * 2, json=ROWS, **HOT)
    engine.run([("warm", compact), ("warm", spaced)])
    num_threads = threading.active_count()
    streams = engine.stream([(f"{i}", (compact, spaced)[i % 2]) for i in range(8)])
    engine.shutdown()
    assert threading.active_count() <= num_threads
    for number, deltas in enumerate(streams):
        text = "".join(delta.text for delta in deltas)
        reason = deltas[-1].finish_reason
        if number % 2 and reason == "length":
            num_tokens = sum(len(delta.token_ids) for delta in deltas)
            assert num_tokens == MAX_WHITESPACE * 2
        else:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), ROWS)
            assert text == text.rstrip()
        assert not re.search(rf"\s{{{MAX_WHITESPACE + 1}}}", text)


def token(text: str) -> int:
    token_id = TOKENIZER.token_to_id(text)
    assert token_id is not None
    return token_id


TEXT = {
    "type": "object",
    "properties": {"s": {"type": "string", "maxLength": 6}},
    "required": ["s"],
    "additionalProperties": False,
}
# Name -> (parameters, what the answer must match, why it ends).
ENDINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "digits go on": (
        {"regex": "[0-9]+", "logit_bias": {EOS_ID: -100}, "max_tokens": 12},
        "[0-9]{12}",
        "length",
    ),
    "digits may end": (
        {"regex": "[0-9]+", "logit_bias": {EOS_ID: 100}},
        "[0-9]",
        "stop",
    ),
    "an integer goes on": (
        {
            "json": {"type": "integer", "minimum": 1},
            "logit_bias": {EOS_ID: -100},
            "max_tokens": 12,
        },
        "[1-9][0-9]{11}",
        "length",
    ),
    "the longer choice": (
        {"choice": ["a", "ab"], "logit_bias": {token("b"): 100}},
        "ab",
        "stop",
    ),
    "the shorter choice": (
        {"choice": ["a", "ab"], "logit_bias": {EOS_ID: 100}},
        "a",
        "stop",
    ),
    "closed without an end token": (
        {
            "regex": "once upon a time",
            "ignore_eos": True,
            "logit_bias": {EOS_ID: -100},
        },
        "once upon a time",
        "stop",
    ),
    "a tempting end token": (
        {"regex": "once upon a time", "logit_bias": {EOS_ID: 100}},
        "once upon a time",
        "stop",
    ),
    "a tempting stop token": (
        {
            "json": TEXT,
            "disable_any_whitespace": True,
            "stop_token_ids": [token("z")],
            "logit_bias": {token("z"): 100},
        },
        r'\{"s":"[^z]*"\}',
        "stop",
    ),
    "an empty array": (
        {"json": {"type": "array"}, "logit_bias": {token("]"): 100}},
        r"\[\s*\]",
        "stop",
    ),
}


@pytest.mark.parametrize("drafter", ["no drafter", *KINDS])
def test_a_grammar_ends_where_it_may_and_must(
    model: Path, tmp_path: Path, drafter: str
):
    requests = []
    for params, _, _ in ENDINGS.values():
        for sampled in ({"temperature": 0.0}, {"temperature": 1.0}, {"seed": 3}):
            requests.append(("it ends: ", constrained(**params, **sampled)))
    if drafter == "no drafter":
        engine = TinyEngine(model)
    else:
        engine = make_engine(drafter, model, tmp_path, num_drafts=7)
    outputs = engine.run(requests)
    engine.shutdown()
    for index, (name, (_, pattern, reason)) in enumerate(ENDINGS.items()):
        for output in outputs[index * 3 : index * 3 + 3]:
            [answer] = output.outputs
            assert re.fullmatch(pattern, answer.text), (name, answer.text)
            assert answer.finish_reason == reason, name


OPTIONAL = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"], "maxLength": 4},
        "note": {"enum": ["ab", None]},
    },
    "additionalProperties": False,
}
LOOK_ALIKE = '{"name":"no such","note":7,"more":null} {"name":null,"note":"abc"} '


@bit_for_bit
@pytest.mark.parametrize(
    "drafter", ["ngram", "H", "dspark probabilistic", "ngram adaptive"]
)
def test_a_forbidden_text_in_the_prompt_is_drafted_and_refused(
    model: Path, tmp_path: Path, drafter: str
):
    requests = [
        (
            LOOK_ALIKE + f"{number}",
            constrained(
                json=OPTIONAL, max_tokens=40, temperature=1.0, seed=number, logprobs=1
            ),
        )
        for number in range(16)
    ]
    alone = TinyEngine(model, max_num_seqs=1)
    expected = [visible(output) for output in alone.run(requests)]
    alone.shutdown()
    engine = make_engine(drafter, model, tmp_path)
    outputs = engine.run(requests)
    accepted = engine.executor.accepted
    engine.shutdown()
    assert [visible(output) for output in outputs] == expected
    for output in outputs:
        if output.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(text_of(output)), OPTIONAL)
    assert accepted[0] > 0


@pytest.mark.parametrize("drafter", KINDS)
def test_a_contradiction_ends_its_request_where_it_would_without_drafts(
    model: Path, tmp_path: Path, drafter: str
):
    """Also amid drafts; and the neighbours say what they say alone."""
    digits = [token(char) for char in "0123456789"]
    dead_end = constrained(
        regex="[0-9]{6}[a-z]", seed=1, allowed_token_ids=digits, max_tokens=20
    )
    repeating = ("0123456789" * 3, dead_end)
    neighbour = ("beside it", constrained(regex="[a-z0-9]{20}", seed=2))
    plain = TinyEngine(model, max_num_seqs=1)
    expected = visible(plain.run([neighbour])[0])
    plain.add(*repeating)
    _, [error] = plain.drain()
    plain.shutdown()
    assert "after 6 tokens of output" in str(error)
    engine = make_engine(drafter, model, tmp_path)
    for _ in range(3):
        engine.add(*repeating)
    request_id = engine.add(*neighbour)
    finished, errors = engine.drain()
    engine.shutdown()
    assert [str(one) for one in errors] == [str(error)] * 3
    assert visible(finished[request_id]) == expected


@pytest.mark.parametrize("drafter", ["ngram", "ngram adaptive"])
def test_a_draft_that_the_library_gives_up_on_is_only_refused(
    model: Path, tmp_path: Path, drafter: str
):
    # No text with an n in it ends: to read a few of them is past the parser's limits.
    grammar = 'start: "xy" ("okfine" | "n" inf)\ninf: "n" inf'
    params = constrained(
        grammar=grammar, temperature=0.0, logit_bias={token("o"): 100}, max_tokens=20
    )
    requests = [("xynnnnnn. xynnnnnn. xynnnnnn. ", params)] * 3
    expected = run_plain(model, requests)
    engine = make_engine(drafter, model, tmp_path)
    outputs = engine.run(requests)
    engine.shutdown()
    assert [text_of(output) for output in outputs] == ["xyokfine"] * 3
    assert [visible(output) for output in outputs] == expected


@pytest.mark.parametrize("drafter", ["ngram", "ngram adaptive"])
def test_a_grammar_that_cannot_look_ahead_goes_on_without_drafts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
):
    # As if no grammar could be compiled again within a step.
    monkeypatch.setattr(backend_llguidance, "MAX_RECOMPILE_S", -1.0)
    params = constrained(regex="(abc){9}", temperature=0.0)
    requests = [("abcabcabc", params), ("abcabcabc", PLAIN)] * 2
    expected = run_plain(model, requests)
    engine = make_engine(drafter, model, tmp_path)
    outputs = engine.run(requests)
    engine.shutdown()
    assert [text_of(output) for output in outputs[::2]] == ["abc" * 9] * 2
    assert [visible(output) for output in outputs] == expected
