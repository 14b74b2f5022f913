"""A cache in half precision: the same answer however its tokens come into it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from vllm.sampling_params import SamplingParams

PROMPT = "A prompt of several blocks of the cache, so that its start can be found again"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
REQUESTS = [(PROMPT, GREEDY), (PROMPT[:50], SEEDED), (PROMPT[20:], GREEDY)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def cache_dtypes(engine: TinyEngine) -> set[torch.dtype]:
    caches = engine.executor.worker.model_runner.kv_caches
    return {cache.dtype for cache in caches.values()}


HALF = {"quantization": "int8", "kv_cache_dtype": "float16"}


def answer(
    model: Path, *, num_runs: int = 1, **flags: Any
) -> tuple[list[dict[str, Any]], TinyEngine]:
    """Return the answers of the last of some runs, and the engine."""
    engine = TinyEngine(model, **(HALF | flags))
    for _ in range(num_runs):
        outputs = engine.run(REQUESTS)
    return [visible(output) for output in outputs], engine


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, Any]]:
    """The answers when every request is computed in whole prompts."""
    answers, engine = answer(model, max_num_batched_tokens=512)
    assert cache_dtypes(engine) == {torch.float16}
    engine.shutdown()
    return answers


@bit_for_bit
@pytest.mark.parametrize("max_num_batched_tokens", [8, 16, 37])
def test_chunks_of_any_size_give_the_same_answers(
    model, expected, max_num_batched_tokens
):
    answers, engine = answer(
        model, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8
    )
    engine.shutdown()
    assert answers == expected


@bit_for_bit
def test_cached_prefixes_give_the_same_answers(model, expected):
    answers, engine = answer(model, num_runs=2)
    cached = engine.run(REQUESTS[:1])[0].num_cached_tokens
    engine.shutdown()
    assert cached >= 64
    assert answers == expected


@bit_for_bit
def test_preempted_requests_give_the_same_answers(model, expected):
    answers, engine = answer(
        model, num_gpu_blocks_override=10, enable_prefix_caching=False
    )
    num_preempted = engine.executor.num_preempted
    engine.shutdown()
    assert num_preempted > 0
    assert answers == expected


@bit_for_bit
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_give_the_same_answers(model, expected, method):
    config = NGRAM
    if method == "draft_model":
        config = {"model": str(model), "num_speculative_tokens": 3}
    answers, engine = answer(model, speculative_config=config)
    assert cache_dtypes(engine) == {torch.float16}
    assert max(engine.executor.accepted) > 0
    engine.shutdown()
    assert answers == expected


def test_half_the_precision_is_what_changes(model, expected):
    answers, engine = answer(model, kv_cache_dtype="float32")
    assert cache_dtypes(engine) == {torch.float32}
    engine.shutdown()
    first, other = (one[0]["answers"][0]["logprobs"] for one in (expected, answers))
    assert first != other


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"quantization": "none", "kv_cache_dtype": "auto"}, torch.float32),
        ({"kv_cache_dtype": "auto"}, torch.float32),
        ({"quantization": "none", "kv_cache_dtype": "float16"}, torch.float16),
        (
            {"quantization": "none", "dtype": "bfloat16", "kv_cache_dtype": "auto"},
            torch.bfloat16,
        ),
        (
            {
                "quantization": "none",
                "dtype": "bfloat16",
                "kv_cache_dtype": "float16",
            },
            torch.float16,
        ),
    ],
)
def test_other_weights_and_caches_go_together(model, flags, dtype):
    answers, engine = answer(model, **flags)
    assert cache_dtypes(engine) == {dtype}
    engine.shutdown()
    assert all(len(one["answers"][0]["token_ids"]) == 20 for one in answers)


@pytest.mark.parametrize(("kv_cache_dtype", "factor"), [("float32", 1), ("float16", 2)])
def test_the_memory_of_the_cache_holds_more_blocks_in_half(
    model, kv_cache_dtype, factor
):
    # Two layers, keys and values, 16 tokens, two heads of 16.
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4
    engine = TinyEngine(
        model, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=40 * block_bytes
    )
    ready = engine.engine._client.ready
    engine.shutdown()
    assert (ready.num_gpu_blocks, ready.cache_dtype) == (40 * factor, kv_cache_dtype)
