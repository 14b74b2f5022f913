"""Features x drafters x conditions: speculation changes no token and no score."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.v1.e2e.test_feature_matrix import (
    CONDITIONS,
    REQUESTS,
    TINY_POOL,
    Outputs,
    run_together,
)
from tests.v1.e2e.tiny_drafter import save_tiny_drafter
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model, visible
from vllm import _custom_ops as ops
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.skipif(
    not ops.has_cpu_ops(), reason="torch's own products depend on the number of rows"
)

# By their use: H accepts nearly all, P rolls back all the time.
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
    "H": {"method": "draft_model", "num_speculative_tokens": 3},
    "H probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    },
    "P": {"method": "draft_model", "num_speculative_tokens": 7},
    "P probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
    "P, short context": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "max_model_len": 40,
    },
    "dspark": {"method": "dspark"},
    "dspark probabilistic": {
        "method": "dspark",
        "draft_sample_method": "probabilistic",
    },
    "dspark rnn, reduced": {
        "method": "dspark",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    },
    "dspark, short context": {"method": "dspark", "max_model_len": 40},
    "dflash": {"method": "dflash"},
}
# What differs from a drafter of four tokens with a vanilla head.
BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark rnn, reduced": {
        "markov_head_type": "rnn",
        "draft_ids": range(20, 200, 2),
        "sample_from_anchor": False,
        "block_size": 6,
    },
    "dflash": {
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
}


def run_preempting(engine: TinyEngine) -> list[Outputs]:
    rounds = run_together(engine)
    assert engine.executor.resumed
    return rounds


def run_unruly(engine: TinyEngine) -> list[Outputs]:
    """Let requests of any priority and cap come, leave, return, and lose prefixes."""
    rng = random.Random(0)
    waiting = list(REQUESTS)
    rng.shuffle(waiting)
    running: dict[str, str] = {}
    outputs: Outputs = {}
    for number in range(MAX_STEPS):
        if waiting and rng.random() < 0.4:
            name, request_id = waiting.pop(), str(number)
            prompt, params = REQUESTS[name]
            params = params.clone()
            params.output_kind = RequestOutputKind.FINAL_ONLY
            params.num_speculative_tokens = rng.choice([None, None, 0, 1, 2, 5])
            engine.engine.add_request(
                request_id, prompt, params, priority=rng.randint(0, 3)
            )
            running[request_id] = name
        if running and rng.random() < 0.05:
            request_id = rng.choice(list(running))
            waiting.append(running.pop(request_id))
            engine.engine.abort_request(request_id)
        if rng.random() < 0.05:
            engine.engine.reset_prefix_cache()
        for output in engine.engine.step():
            outputs[running.pop(output.request_id)] = output
        if not (waiting or running):
            break
    engine.engine.check_integrity()
    assert outputs.keys() == REQUESTS.keys()
    assert engine.executor.resumed
    return [outputs]


UNRULY = TINY_POOL | {
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
}
MAX_STEPS = 2000
RUNS = {
    name: CONDITIONS[name]
    for name in ("mixed batch", "chunks of 17", "warm prefix cache")
} | {"preempting": (TINY_POOL, run_preempting), "unruly": (UNRULY, run_unruly)}


@pytest.fixture(scope="module")
def poor_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("poor"), seed=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    alone = TinyEngine(model, enable_prefix_caching=False)
    outputs = {
        name: visible(alone.run([request])[0]) for name, request in REQUESTS.items()
    }
    alone.shutdown()
    return outputs


@pytest.mark.parametrize("condition", RUNS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_feature_means_what_it_means_without_drafts(
    model: Path,
    poor_drafter: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    drafter: str,
    condition: str,
):
    config = dict(DRAFTERS[drafter])
    if config["method"] == "draft_model":
        config["model"] = str(model if drafter.startswith("H") else poor_drafter)
    elif config["method"] != "ngram":
        changes = BLOCK_DRAFTERS.get(drafter, {})
        config["model"] = str(save_tiny_drafter(tmp_path, model, **changes))
    kwargs, run = RUNS[condition]
    engine = TinyEngine(model, speculative_config=config, **kwargs)
    rounds = run(engine)
    engine.shutdown()
    wrong = [
        name
        for outputs in rounds
        for name, output in outputs.items()
        if visible(output) != expected[name]
    ]
    assert wrong == []
