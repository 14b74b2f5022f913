"""Features x drafters x conditions: speculation changes no token and no score."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.markers import bit_for_bit
from tests.v1.e2e.conftest import Expect
from tests.v1.e2e.test_feature_matrix import (
    CONDITIONS,
    FEATURES,
    REQUESTS,
    TINY_POOL,
    Outputs,
    Run,
    run_in_order,
    run_together,
)
from tests.v1.e2e.tiny_drafter import (
    ADAPTIVE,
    DRAFTERS,
    KINDS,
    check_regimes,
    make_drafting_engine,
)
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from vllm.sampling_params import RequestOutputKind

pytestmark = bit_for_bit


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


# Everything constrained but the grammar in Lark's notation, which it cannot read.
XGRAMMARS = tuple(
    name
    for name, params in FEATURES.items()
    if "structured_outputs" in params and name != "grammar"
)
# What shows a score, and what else shapes or cuts an answer, beside it.
SCORED = [
    name
    for name, params in FEATURES.items()
    if {"logprobs", "prompt_logprobs"} & params.keys()
] + ["greedy", "json", "literal", "all penalties", "long prompt"]


def run_scored(engine: TinyEngine) -> list[Outputs]:
    return [run_in_order(engine, SCORED)]


def find_wrong(engine: TinyEngine, run: Run, expected: dict[str, Any]) -> list[str]:
    rounds = run(engine)
    engine.shutdown()
    return [
        name
        for outputs in rounds
        for name, output in outputs.items()
        if visible(output) != expected[name]
    ]


# The other conditions of adaptive engines, and the modes, are in test_budget_matrix.
CASES = [(drafter, condition) for drafter in DRAFTERS for condition in RUNS] + [
    (drafter, condition)
    for drafter in ADAPTIVE
    for condition in ("mixed batch", "unruly")
]


@pytest.mark.parametrize(("drafter", "condition"), CASES)
def test_every_feature_means_what_it_means_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str, condition: str
):
    kwargs, run = RUNS[condition]
    engine = make_drafting_engine(drafter, model, tmp_path, **kwargs)
    assert find_wrong(engine, run, expect()) == []
    check_regimes(engine)


@pytest.mark.parametrize(
    "mode", ["processed_logprobs", "raw_logits", "processed_logits"]
)
@pytest.mark.parametrize("drafter", [kind for kind in KINDS if kind not in ADAPTIVE])
def test_every_mode_of_logprobs_shows_what_it_shows_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str, mode: str
):
    engine = make_drafting_engine(
        drafter, model, tmp_path, logprobs_mode=mode, max_num_batched_tokens=90
    )
    assert find_wrong(engine, run_scored, expect(mode)) == []


@pytest.mark.parametrize("drafter", KINDS)
def test_grammars_of_the_other_backend_mean_what_they_mean_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str
):
    engine = make_drafting_engine(
        drafter, model, tmp_path, structured_outputs_config={"backend": "xgrammar"}
    )
    expected = expect(grammar_backend="xgrammar", names=XGRAMMARS)
    outputs = run_in_order(engine, XGRAMMARS)
    engine.shutdown()
    assert {name: visible(output) for name, output in outputs.items()} == expected
