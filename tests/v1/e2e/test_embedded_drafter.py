"""A model with a drafter of its own, and requests that ask for none of its drafts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_drafter import save_tiny_drafter
from tests.v1.e2e.tiny_engine import TinyEngine, visible
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.sampling_params import SamplingParams

BLOCK = 4
PROMPT = "A prompt of several blocks of the cache, so that its start can be found again"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)


@pytest.fixture
def own(model: Path, tmp_path: Path, embed: Callable[[object, object], None]) -> Path:
    """Give the tiny model a drafter of its own."""
    embed(model, save_tiny_drafter(tmp_path, model, block_size=BLOCK))
    return model


@contextmanager
def counted(module_class: type[torch.nn.Module]) -> Iterator[list[int]]:
    """Collect the number of tokens in each pass of such models."""
    sizes: list[int] = []
    # A pass of blocks may be a part of one operation, which is not to be had here.
    has_blocks = module_class is DSparkModel
    forward = module_class.forward

    def note(model: torch.nn.Module, input_ids: torch.Tensor, *args: Any) -> Any:
        sizes.append(len(input_ids))
        return forward(model, input_ids, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_class, "forward", note)
        if has_blocks:
            patch.setattr(module_class, "maybe_draft", lambda *_: None)
        yield sizes


def speculator_of(engine: TinyEngine) -> Any:
    return engine.executor.worker.model_runner.speculator


@bit_for_bit
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_model_len": 96, "enable_chunked_prefill": False},
        {"enable_prefix_caching": False, "block_size": 32},
        {"num_gpu_blocks_override": 10, "block_size": 16},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"load_format": "dummy", "seed": 3},
        {"scheduling_policy": "priority", "logprobs_mode": "processed_logprobs"},
    ],
    ids=lambda flags: " ".join(flags) or "none",
)
def test_the_default_goes_with_every_flag(own: Path, flags: dict[str, Any]):
    answers = []
    for values in ("auto", None):
        engine = TinyEngine(own, speculative_config=values, **flags)
        assert (speculator_of(engine) is not None) == (values == "auto")
        outputs = engine.run([(PROMPT, GREEDY), (PROMPT[::-1], SEEDED)])
        answers.append([visible(output) for output in outputs])
        engine.shutdown()
    # Half the precision makes ties, which the shape of a batch decides.
    if flags.get("dtype", "float32") == "float32":
        assert answers[0] == answers[1]
    assert all(len(one["answers"][0]["token_ids"]) == 12 for one in answers[0])


def test_a_context_too_short_for_blocks_is_served_without_drafts(own: Path):
    engine = TinyEngine(own, max_model_len=BLOCK - 1)
    assert speculator_of(engine) is None
    [output] = engine.run([([70], SamplingParams(max_tokens=2, ignore_eos=True))])
    assert len(output.outputs[0].token_ids) == 2
    engine.shutdown()


def test_the_profile_holds_the_largest_proposal(own: Path):
    engine = TinyEngine(own, max_num_seqs=3, max_num_batched_tokens=50)
    with counted(LlamaForCausalLM) as target, counted(DSparkModel) as drafter:
        engine.executor.worker.model_runner.profile_run()
    assert (target, drafter) == ([50], [3 * BLOCK])
    engine.shutdown()


def test_the_profile_holds_a_draft_models_largest_step(model: Path):
    config = {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 2,
    }
    engine = TinyEngine(
        model, max_num_seqs=3, max_num_batched_tokens=50, speculative_config=config
    )
    with counted(LlamaForCausalLM) as passes:
        engine.executor.worker.model_runner.profile_run()
    # The target's, then the drafter's, with a sampled token of each request.
    assert passes == [50, 53]
    engine.shutdown()


def test_a_profile_leaves_no_trace(own: Path):
    engine = TinyEngine(own)
    before = [visible(one) for one in engine.run([(PROMPT, SEEDED)])]
    engine.executor.worker.model_runner.profile_run()
    assert [visible(one) for one in engine.run([(PROMPT, SEEDED)])] == before
    engine.shutdown()


def without_drafts(params: SamplingParams) -> SamplingParams:
    capped = params.clone()
    capped.num_speculative_tokens = 0
    return capped


def test_no_block_is_run_for_requests_that_want_no_drafts(own: Path):
    engine = TinyEngine(own)
    [expected] = engine.run([(PROMPT, SEEDED)])
    with counted(DSparkModel) as blocks:
        outputs = engine.run([(PROMPT, without_drafts(SEEDED))] * 2)
    assert blocks == []
    assert [visible(output) for output in outputs] == [visible(expected)] * 2
    engine.shutdown()


def test_a_block_is_run_only_for_those_of_a_batch_that_want_drafts(own: Path):
    engine = TinyEngine(own)
    params = [SEEDED, without_drafts(SEEDED), without_drafts(GREEDY)]
    with counted(DSparkModel) as blocks:
        engine.run([(PROMPT, one) for one in params])
    assert set(blocks) == {BLOCK}
    engine.shutdown()


@bit_for_bit
@pytest.mark.parametrize("method", ["dspark", "draft_model"])
def test_the_context_is_kept_for_requests_that_do_want_drafts(
    own: Path, model: Path, method: str
):
    # An adaptive budget may propose nothing, by what the first request has shown.
    config: dict[str, Any] = {"enable_adaptive_verification": False}
    if method == "draft_model":
        config |= {"method": method, "model": str(model), "num_speculative_tokens": 3}

    def proposals_after(first: SamplingParams) -> tuple[list[Any], int]:
        engine = TinyEngine(own, speculative_config=config)
        engine.run([(PROMPT, first)])
        speculator, taken = speculator_of(engine), []
        propose = speculator.propose

        def record(*args: Any) -> Any:
            drafts = propose(*args)
            taken.append(drafts.token_ids.tolist())
            return drafts

        speculator.propose = record
        [output] = engine.run([(PROMPT, SEEDED)])
        engine.shutdown()
        return taken, output.num_cached_tokens

    drafted, not_drafted = map(proposals_after, (SEEDED, without_drafts(SEEDED)))
    assert drafted == not_drafted
    assert drafted[1] == 64
