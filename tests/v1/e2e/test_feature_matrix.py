"""Sampling features x conditions: a request says what it says alone, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_engine import MAX_MODEL_LEN, TinyEngine, visible
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = bit_for_bit

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Every byte is a token of its own: these ids are what greedy text likes.
LIKED = [182, 185, 186, 14, 187]

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature": SEEDED,
    "hot": {"temperature": 3.0, "seed": -5},
    "top_k": SEEDED | {"top_k": 5},
    "top_p": SEEDED | {"top_p": 0.7},
    "min_p": SEEDED | {"min_p": 0.2},
    "all filters": SEEDED | {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "n=3": SEEDED | {"n": 3, "logprobs": 2},
    "n=3 greedy": GREEDY | {"n": 3},
    "presence": GREEDY | {"presence_penalty": 1.5},
    "frequency": SEEDED | {"frequency_penalty": 1.5},
    "repetition": GREEDY | {"repetition_penalty": 1.7},
    "all penalties": SEEDED
    | {"presence_penalty": -1, "frequency_penalty": 0.3, "repetition_penalty": 0.8},
    "logit_bias": SEEDED | {"logit_bias": {5: 4.0, 9: -100.0, LIKED[0]: -3.0}},
    "allowed": SEEDED | {"allowed_token_ids": list(range(30, 60))},
    "bad_words": GREEDY | {"bad_words": ["he", "/", "7\u00ef"]},
    "stop": SEEDED | {"stop": ["a", "b", "7", "3"], "logprobs": 1},
    "stop kept": SEEDED
    | {"stop": ["a", "b", "7", "3"], "include_stop_str_in_output": True},
    "stop ids": SEEDED | {"stop_token_ids": list(range(0, 250, 6))},
    "ignore_eos": SEEDED | {"logit_bias": {259: 6.0}, "ignore_eos": True},
    "eos": SEEDED | {"logit_bias": {259: 4.0}},
    "min_tokens": GREEDY | {"logit_bias": {259: 100.0}, "min_tokens": 9},
    "logprobs 0": GREEDY | {"logprobs": 0},
    "logprobs 5": SEEDED | {"logprobs": 5, "presence_penalty": 1.0},
    # Reaches into the padded ids, which are all equal.
    "logprobs 250": SEEDED | {"logprobs": 250, "max_tokens": 3},
    "logprobs -1": SEEDED | {"logprobs": -1, "max_tokens": 3},
    "logprob ids": SEEDED | {"logprobs": 0, "logprob_token_ids": [3, 1, 260, 182]},
    "filtered logprobs": SEEDED | {"top_k": 2, "logprobs": 6},
    "prompt_logprobs": GREEDY | {"prompt_logprobs": 2},
    "prompt_logprobs -1": SEEDED | {"prompt_logprobs": -1, "max_tokens": 2},
    "all logprobs": SEEDED | {"prompt_logprobs": 0, "logprobs": 4, "n": 2},
    "scored": {"prompt_logprobs": 1, "max_tokens": 0},
    "json": SEEDED | {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "json_object": SEEDED | {"structured_outputs": {"json_object": True}},
    "regex": SEEDED | {"structured_outputs": {"regex": "[a-f]{3,9}-hello [0-9]+"}},
    "choice": SEEDED
    | {"structured_outputs": {"choice": ["hell", "hello", "hall"]}, "logprobs": 3},
    "grammar": SEEDED
    | {"structured_outputs": {"grammar": 'start: "<" /[a-z]+/ ">"'}, "logprobs": 2},
    "n=3 regex": SEEDED | {"structured_outputs": {"regex": "[ab]{5,20}"}, "n": 3},
    "regex biased": SEEDED
    | {
        "structured_outputs": {"regex": "[a-z ]{12}"},
        "repetition_penalty": 1.3,
        "top_k": 4,
        "logit_bias": {75: 5.0},
    },
    "literal": SEEDED
    | {
        "structured_outputs": {"regex": "There is but one legal answer, 42\\."},
        "max_tokens": 50,
    },
    "long prompt": SEEDED | {"num_heys": 18},
}
PREFIX = "The same words stand at the start of many prompts, hello. "


def make_request(name: str) -> tuple[str, SamplingParams]:
    number = list(FEATURES).index(name)
    params: dict[str, Any] = {"max_tokens": 20} | FEATURES[name]
    num_heys = params.pop("num_heys", number % 4)
    prompt = PREFIX[: 7 * (number % 5)] + f"{name}: " + "hey " * num_heys
    if "structured_outputs" in params:
        constraint = StructuredOutputsParams(**params["structured_outputs"])
        params["structured_outputs"] = constraint
    return prompt, SamplingParams(**params)


REQUESTS = {name: make_request(name) for name in FEATURES}
# They need a second block when a request beside them has said seven tokens.
GROWING = ("grows on", SamplingParams(temperature=0.0, max_tokens=16))
# One request of the full length fits, and little more.
TINY_POOL = {"num_gpu_blocks_override": MAX_MODEL_LEN // 16 + 2}


Outputs = dict[str, RequestOutput]


def run_together(engine: TinyEngine) -> list[Outputs]:
    return [run_in_order(engine, list(REQUESTS))]


def run_together_again(engine: TinyEngine) -> list[Outputs]:
    rounds = run_together(engine) + run_together(engine)
    assert any(output.num_cached_tokens for output in rounds[1].values())
    return rounds


def run_preempting(engine: TinyEngine) -> list[Outputs]:
    """Let each request be the last of five whose blocks soon do not suffice."""
    outputs = {
        name: engine.run([GROWING] * 4 + [request])[-1]
        for name, request in REQUESTS.items()
    }
    assert len(engine.executor.resumed) > 3 / 4 * len(REQUESTS)
    return [outputs]


def run_in_order(engine: TinyEngine, names: Sequence[str]) -> Outputs:
    outputs = engine.run([REQUESTS[name] for name in names])
    return dict(zip(names, outputs, strict=True))


Run = Callable[[TinyEngine], list[Outputs]]
CONDITIONS: dict[str, tuple[dict[str, Any], Run]] = {
    "mixed batch": ({}, run_together),
    "chunks of 16": (
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        run_together,
    ),
    "chunks of 17": ({"max_num_batched_tokens": 17, "max_num_seqs": 5}, run_together),
    "chunks of 64": ({"max_num_batched_tokens": 64}, run_together),
    "preempting": (TINY_POOL, run_preempting),
    "preempting in chunks": (
        TINY_POOL
        | {
            "max_num_batched_tokens": 17,
            "max_num_seqs": 17,
            "enable_prefix_caching": False,
        },
        run_preempting,
    ),
    "warm prefix cache": ({}, run_together_again),
    "no prefix cache": ({"enable_prefix_caching": False}, run_together),
    "one at a time": ({"max_num_seqs": 1}, run_together),
}


@pytest.mark.parametrize(
    ("mode", "conditions"),
    [
        ("raw_logprobs", list(CONDITIONS)),
        ("processed_logprobs", ["mixed batch", "preempting in chunks"]),
        ("processed_logits", ["mixed batch"]),
    ],
)
def test_every_feature_means_the_same_under_every_condition(
    model: Path,
    expect: Callable[..., dict[str, Any]],
    mode: str,
    conditions: list[str],
):
    expected = expect(mode)
    wrong = []
    for condition in conditions:
        kwargs, run = CONDITIONS[condition]
        engine = TinyEngine(model, logprobs_mode=mode, **kwargs)
        rounds = run(engine)
        engine.shutdown()
        wrong += [
            (condition, name)
            for outputs in rounds
            for name, output in outputs.items()
            if visible(output) != expected[name]
        ]
    assert wrong == []
