"""Features x drafters x conditions: speculation changes no token and no score."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

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
from tests.v1.e2e.tiny_drafter import DRAFTERS, KINDS, make_speculative_config
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from vllm import _custom_ops as ops
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.skipif(
    not ops.has_cpu_ops(), reason="torch's own products depend on the number of rows"
)


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
Expect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def expect(model: Path) -> Expect:
    """What every request says alone and without drafts."""

    @cache
    def run_alone(
        mode: str = "raw_logprobs",
        grammar_backend: str = "auto",
        names: tuple[str, ...] = tuple(REQUESTS),
    ) -> dict[str, Any]:
        alone = TinyEngine(
            model,
            enable_prefix_caching=False,
            logprobs_mode=mode,
            structured_outputs_config={"backend": grammar_backend},
        )
        outputs = {name: visible(alone.run([REQUESTS[name]])[0]) for name in names}
        alone.shutdown()
        return outputs

    return run_alone


def find_wrong(engine: TinyEngine, run: Run, expected: dict[str, Any]) -> list[str]:
    rounds = run(engine)
    engine.shutdown()
    return [
        name
        for outputs in rounds
        for name, output in outputs.items()
        if visible(output) != expected[name]
    ]


@pytest.mark.parametrize("condition", RUNS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_feature_means_what_it_means_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str, condition: str
):
    config = make_speculative_config(drafter, model, tmp_path)
    kwargs, run = RUNS[condition]
    engine = TinyEngine(model, speculative_config=config, **kwargs)
    assert find_wrong(engine, run, expect()) == []


@pytest.mark.parametrize(
    "mode", ["processed_logprobs", "raw_logits", "processed_logits"]
)
@pytest.mark.parametrize("drafter", KINDS)
def test_every_mode_of_logprobs_shows_what_it_shows_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str, mode: str
):
    config = make_speculative_config(drafter, model, tmp_path)
    engine = TinyEngine(
        model, speculative_config=config, logprobs_mode=mode, max_num_batched_tokens=90
    )
    assert find_wrong(engine, run_together, expect(mode)) == []


@pytest.mark.parametrize("drafter", KINDS)
def test_grammars_of_the_other_backend_mean_what_they_mean_without_drafts(
    model: Path, expect: Expect, tmp_path: Path, drafter: str
):
    config = make_speculative_config(drafter, model, tmp_path)
    engine = TinyEngine(
        model,
        speculative_config=config,
        structured_outputs_config={"backend": "xgrammar"},
    )
    expected = expect(grammar_backend="xgrammar", names=XGRAMMARS)
    outputs = run_in_order(engine, XGRAMMARS)
    engine.shutdown()
    assert {name: visible(output) for name, output in outputs.items()} == expected
