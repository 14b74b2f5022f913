"""Which steps compute whole rows of logits, and that nobody's tokens depend on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.markers import bit_for_bit, needs_cpu_ops
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model
from vllm import _custom_ops as ops
from vllm.config.model import LOGPROBS_MODES
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["abcabcabc", "xyzzy", "hello hello"]
WHOLE_ROWS = {
    "logprobs": SamplingParams(temperature=0.0, logprobs=-1, max_tokens=30),
    "chosen logprobs": SamplingParams(
        temperature=0.0, logprobs=1, logprob_token_ids=[5], max_tokens=30
    ),
    "draws": SamplingParams(seed=1, max_tokens=30, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, max_tokens=30, ignore_eos=True
    ),
    "grammar": SamplingParams(
        temperature=0.0,
        max_tokens=30,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{28}"),
    ),
}

# Which prompt, and how many candidates beside the token.
WISHES = [(0, 5), (1, 0), (2, 20), (0, None)]


def with_logprobs(num_logprobs: int | None) -> SamplingParams:
    params = GREEDY.clone()
    params.logprobs = num_logprobs
    return params


def seen(outputs: list[RequestOutput]) -> list[object]:
    """Return the tokens of each request, and all that is said of them."""
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs
    ]


@pytest.fixture(scope="module", params=[None, NGRAM], ids=["plain", "ngram"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[TinyEngine]:
    engine = TinyEngine(model, speculative_config=request.param)
    yield engine
    engine.shutdown()


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of logits that were computed, a number for each time."""
    numbers: list[int] = []
    compute_logits = DenseCausalLM.compute_logits

    def counted(model: DenseCausalLM, hidden_states: torch.Tensor) -> torch.Tensor:
        numbers.append(len(hidden_states))
        return compute_logits(model, hidden_states)

    monkeypatch.setattr(DenseCausalLM, "compute_logits", counted)
    return numbers


@needs_cpu_ops
def test_a_step_of_greedy_requests_computes_no_logits(engine, num_rows):
    outputs = engine.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * 3
    assert num_rows == []


@needs_cpu_ops
@pytest.mark.parametrize("num_logprobs", [0, 1, 20])
def test_logprobs_of_greedy_requests_compute_no_logits(engine, num_rows, num_logprobs):
    [plain] = engine.run([(PROMPTS[0], GREEDY)])
    shown = with_logprobs(num_logprobs)
    outputs = engine.run([(prompt, shown) for prompt in PROMPTS] + [("abab", GREEDY)])
    assert num_rows == []
    assert outputs[0].outputs[0].token_ids == plain.outputs[0].token_ids
    for output in outputs[:-1]:
        [completion] = output.outputs
        assert len(completion.logprobs) == len(completion.token_ids) == 24
        for token_id, position in zip(
            completion.token_ids, completion.logprobs, strict=True
        ):
            assert position[token_id].rank == 1
            assert len(position) == max(num_logprobs, 1)
    assert outputs[-1].outputs[0].logprobs is None


@bit_for_bit
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
def test_logprobs_have_the_bits_of_whole_rows(tmp_path, num_rows, mode, speculation):
    # Several segments, of which the last is shorter.
    model = save_tiny_model(tmp_path, vocab_size=1300)
    engine = TinyEngine(model, speculative_config=speculation, logprobs_mode=mode)
    # By the warm-up.
    num_rows.clear()
    requests = [(PROMPTS[place], with_logprobs(wish)) for place, wish in WISHES]
    alone = [engine.run([request])[0] for request in requests]
    together = engine.run(requests)
    assert num_rows == []
    beside = [
        engine.run([*requests, ("abab", WHOLE_ROWS[reader])])[:-1]
        for reader in ("draws", "penalties", "grammar")
    ]
    engine.shutdown()
    # The grammar's.
    assert num_rows
    assert [seen(one) for one in (together, *beside)] == [seen(alone)] * 4


@pytest.mark.parametrize("reader", WHOLE_ROWS)
def test_a_request_that_needs_whole_rows_changes_no_token_of_others(
    engine, num_rows, reader
):
    alone = engine.run([(prompt, GREEDY) for prompt in PROMPTS])
    num_rows.clear()
    engine.add("abab", WHOLE_ROWS[reader])
    has_grammar = WHOLE_ROWS[reader].structured_outputs is not None
    writes_rows = has_grammar or not ops.has_cpu_ops()
    # Until its grammar is compiled, which others do not wait for.
    while writes_rows and not num_rows:
        engine.engine.step()
    keys = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    finished, errors = engine.drain()
    assert errors == []
    if writes_rows:
        assert max(num_rows) >= 1 + len(PROMPTS)
    assert [finished[key].outputs[0].token_ids for key in keys] == [
        one.outputs[0].token_ids for one in alone
    ]


def test_prompt_logprobs_read_rows_of_their_own(engine, num_rows):
    params = GREEDY.clone()
    [plain] = engine.run([(PROMPTS[0], params)])
    num_rows.clear()
    params.prompt_logprobs = 1
    [shown] = engine.run([(PROMPTS[0], params)])
    assert shown.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(shown.prompt_logprobs) == len(shown.prompt_token_ids)
    assert num_rows
