"""What holds for requests of one engine: seeds, bad logits, ends from outside."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_drafter import DRAFTERS as TABLE
from tests.v1.e2e.tiny_drafter import make_drafting_engine
from tests.v1.e2e.tiny_engine import (
    NAN_ID,
    TinyEngine,
    save_tiny_model,
    visible,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

PROMPT = "hello, whoever reads this"
NEVER_NAN = {NAN_ID: -100.0}


def texts_of(model: Path, *requests: SamplingParams, **kwargs: int) -> list[str]:
    """Return all answers to one prompt, by a new engine."""
    engine = TinyEngine(model, **kwargs)
    outputs = engine.run([(PROMPT, params) for params in requests])
    engine.shutdown()
    return [answer.text for output in outputs for answer in output.outputs]


def test_equal_requests_without_a_seed_differ(model):
    unseeded = SamplingParams(max_tokens=12)
    texts = texts_of(model, unseeded, unseeded, SamplingParams(n=3, max_tokens=12))
    assert len(set(texts)) == 5


def test_the_engines_seed_decides_what_requests_without_one_say(model):
    unseeded = SamplingParams(max_tokens=12)
    first = texts_of(model, unseeded, unseeded, seed=1)
    assert texts_of(model, unseeded, unseeded, seed=1) == first
    assert not set(texts_of(model, unseeded, unseeded, seed=2)) & set(first)


def test_an_engine_made_in_inference_mode_answers_outside_of_it(model):
    params = SamplingParams(seed=1, presence_penalty=1.0, max_tokens=12)
    expected = texts_of(model, params)
    with torch.inference_mode():
        engine = TinyEngine(model)
    outputs = engine.run([(PROMPT, params)])
    engine.shutdown()
    assert [outputs[0].outputs[0].text] == expected


def test_the_first_of_several_answers_is_the_only_one_of_one(model):
    one = texts_of(model, SamplingParams(seed=3, max_tokens=12))
    several = texts_of(model, SamplingParams(seed=3, max_tokens=12, n=4), seed=9)
    assert several[0] == one[0]
    assert len(set(several)) == 4


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_of_any_64_bits_holds(model, seed):
    seeded = SamplingParams(seed=seed, max_tokens=12, n=2)
    assert texts_of(model, seeded) == texts_of(model, seeded, seed=5)


POISONED = [
    {"temperature": 0.0},
    {"logprobs": 3},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "logprobs": 268},
    {"repetition_penalty": 1.2, "bad_words": ["a"], "logit_bias": {3: 1.0}},
    {"prompt_logprobs": 2, "n": 2},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z]{9}")},
]
HEALTHY = [
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 4, "top_p": 0.8, "top_k": 20, "n": 2},
    {"seed": 5, "min_p": 0.1, "frequency_penalty": 0.4, "logprobs": 5},
    {"seed": 6, "structured_outputs": StructuredOutputsParams(regex="[a-z]{9}")},
]


# A drafter reads what a request has sampled before anybody knows that it has failed.
DRAFTERS = (
    "no drafter",
    "ngram",
    "H",
    "H probabilistic",
    "dspark",
    "dspark probabilistic adaptive",
)


def make_engine(model: Path, drafter: str, folder: Path, **kwargs: Any) -> TinyEngine:
    if drafter == "no drafter":
        return TinyEngine(model, **kwargs)
    return make_drafting_engine(drafter, model, folder, **kwargs)


def healthy_requests() -> list[tuple[str, SamplingParams]]:
    return [(PROMPT * 2, SamplingParams(**params)) for params in HEALTHY]


@bit_for_bit
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("counts_nans", ["0", "1"])
def test_nan_logits_end_their_own_request_only(
    model, tmp_path, monkeypatch, counts_nans, drafter
):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", counts_nans)
    # The pool is so small that whatever was poisoned is soon used again.
    engine = make_engine(model, drafter, tmp_path, num_gpu_blocks_override=14)
    expected = [visible(output) for output in engine.run(healthy_requests())]
    for _ in range(2):
        healthy = []
        for index, params in enumerate(POISONED):
            prompt = [*range(index * 8, index * 8 + 20), NAN_ID, *range(20)]
            engine.add(prompt, SamplingParams(**params))
            if index < len(HEALTHY):
                healthy.append(engine.add(*healthy_requests()[index]))
        finished, errors = engine.drain()
        assert len(errors) == len(POISONED)
        assert [visible(finished[request_id]) for request_id in healthy] == expected
    engine.shutdown()


@bit_for_bit
@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_a_drafter_of_nans_costs_acceptance_and_nothing_else(
    model, tmp_path, draft_sample_method
):
    save_tiny_model(tmp_path, seed=1)
    weights = load_file(tmp_path / "model.safetensors")
    nans = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}
    save_file(nans, tmp_path / "model.safetensors")
    plain = TinyEngine(model)
    expected = [visible(output) for output in plain.run(healthy_requests())]
    plain.shutdown()
    config = {
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
        "draft_sample_method": draft_sample_method,
    }
    engine = TinyEngine(model, speculative_config=config)
    outputs = engine.run(healthy_requests())
    engine.shutdown()
    assert [visible(output) for output in outputs] == expected


@bit_for_bit
def test_a_drafter_needs_no_tokenizer(model, tmp_path):
    """Ids are drafted, not texts."""
    save_tiny_model(tmp_path, blur=0.05)
    (tmp_path / "tokenizer.json").write_text("of another kind")
    (tmp_path / "tokenizer_config.json").unlink()
    plain = TinyEngine(model)
    expected = [visible(output) for output in plain.run(healthy_requests())]
    plain.shutdown()
    config = {"model": str(tmp_path), "num_speculative_tokens": 3}
    engine = TinyEngine(model, speculative_config=config)
    outputs = engine.run(healthy_requests())
    assert engine.executor.accepted[3] > 0
    engine.shutdown()
    assert [visible(output) for output in outputs] == expected


@pytest.mark.parametrize("drafter", ["ngram", "H probabilistic", "dspark"])
def test_drafts_accepted_by_chance_break_no_constraint(model, tmp_path, drafter):
    # A block gives four.
    num_drafts = TABLE[drafter].get("num_speculative_tokens", 4)
    synthetic = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0] * num_drafts,
    }
    engine = make_engine(model, drafter, tmp_path, keys=synthetic)
    constraint = StructuredOutputsParams(regex="(ab|cd){7}")
    params = SamplingParams(seed=3, max_tokens=40, structured_outputs=constraint)
    outputs = engine.run([("abcabdcbabcd" * 2, params), (PROMPT, params)])
    engine.shutdown()
    for output in outputs:
        assert re.fullmatch("(ab|cd){7}", output.outputs[0].text)


def test_every_request_that_fails_is_named(model):
    engine = TinyEngine(model)
    bad = [engine.add([NAN_ID, 3], SamplingParams()) for _ in range(3)]
    good = engine.add(PROMPT, SamplingParams())
    finished, errors = engine.drain()
    engine.shutdown()
    assert [error.__notes__ for error in errors] == [
        [f"request_id: {request_id}"] for request_id in bad
    ]
    assert list(finished) == [good]


@bit_for_bit
@pytest.mark.parametrize(
    ("seed", "drafter"),
    [
        (0, "no drafter"),
        (1, "no drafter"),
        (2, "no drafter"),
        (3, "ngram"),
        (4, "H"),
        (5, "H probabilistic"),
        (6, "dspark"),
        (7, "M"),
        (8, "ngram adaptive"),
        (9, "dspark probabilistic adaptive"),
    ],
)
def test_requests_that_leave_at_any_moment_leave_nothing(
    model, tmp_path, seed, drafter
):
    rng = random.Random(seed)
    kinds = [
        {"seed": 1, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"seed": 2, "n": 3},
        {"seed": 3, "structured_outputs": StructuredOutputsParams(regex="[ab]{9,30}")},
    ]
    requests = [
        (PROMPT[: rng.randrange(1, 25)] * rng.randrange(1, 4),
         SamplingParams(max_tokens=rng.randrange(1, 24), logit_bias=NEVER_NAN,
                        **rng.choice(kinds)))
        for _ in range(40)
    ]  # fmt: skip
    engine = make_engine(
        model,
        drafter,
        tmp_path,
        num_gpu_blocks_override=9,
        max_num_batched_tokens=rng.choice([16, 40]),
        max_num_seqs=rng.choice([5, 16]),
    )
    added: dict[str, int] = {}
    finished = {}
    waiting = list(range(len(requests)))
    while waiting or engine.engine.has_unfinished_requests():
        for _ in range(rng.randrange(4)):
            if waiting:
                index = waiting.pop()
                added[engine.add(*requests[index])] = index
        outputs = engine.engine.step()
        finished |= {output.request_id: output for output in outputs}
        if rng.random() < 0.3 and added:
            gone = rng.choice(list(added))
            engine.engine.abort_request(gone)
            if gone not in finished:
                del added[gone]
        engine.engine.check_integrity()
    assert engine.executor.num_preempted > 0
    engine.shutdown()

    alone = TinyEngine(model, enable_prefix_caching=False)
    for request_id, index in added.items():
        [expected] = alone.run([requests[index]])
        assert visible(finished[request_id]) == visible(expected), index
    alone.shutdown()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cache_that_is_forgotten_amid_a_run_changes_no_text(model, tmp_path, drafter):
    """Neither what runs on, nor what is found of it afterwards."""
    requests = [
        (PROMPT * 2, SamplingParams(seed=seed, max_tokens=30, logit_bias=NEVER_NAN))
        for seed in range(4)
    ]
    alone = TinyEngine(model, enable_prefix_caching=False)
    expected = [visible(alone.run([request])[0]) for request in requests]
    alone.shutdown()
    engine = make_engine(model, drafter, tmp_path, max_num_batched_tokens=32)
    for _ in range(2):
        request_ids = [engine.add(*request) for request in requests]
        finished = {}
        for _ in range(4):
            for _ in range(3):
                outputs = engine.engine.step()
                finished |= {output.request_id: output for output in outputs}
            assert engine.engine.reset_prefix_cache()
        last, errors = engine.drain()
        assert errors == []
        finished |= last
        assert [visible(finished[one]) for one in request_ids] == expected
    engine.shutdown()
