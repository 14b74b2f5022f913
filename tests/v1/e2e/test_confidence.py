"""What every drafter says about its drafts in the engine, and what it says it by."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markers import bit_for_bit
from tests.v1.e2e.tiny_drafter import save_tiny_drafter
from tests.v1.e2e.tiny_engine import NAN_ID, TinyEngine, save_tiny_model
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.draft_sampler import DraftSampler, Draws
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

NUM_DRAFTS = 3
WITHOUT_HEADS = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
METHODS = ["ngram", "draft_model", "dspark", "dflash"]
PROMPT = "the same words, the same words, the sa"


def make_engine(
    folder: Path, model: Path, method: str, draft_sample_method: str = "probabilistic"
) -> TinyEngine:
    keys: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        keys |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        keys["draft_sample_method"] = draft_sample_method
    if method == "draft_model":
        keys["model"] = str(save_tiny_model(folder, seed=1))
    elif method != "ngram":
        changes = WITHOUT_HEADS if method == "dflash" else {}
        keys["model"] = str(save_tiny_drafter(folder, model, **changes))
    return TinyEngine(model, speculative_config=keys)


def watch(engine: TinyEngine, look: Any) -> None:
    """Call `look(propose, batch, *args)` in place of every proposal."""
    speculator = engine.executor.worker.model_runner.speculator
    propose = speculator.propose
    speculator.propose = lambda batch, *args: look(propose, batch, *args)


def requests(max_tokens: int) -> list[tuple[str, SamplingParams]]:
    return [
        (PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))
        for params in (
            {"temperature": 0.0},
            {"temperature": 0.7},
            {"temperature": 1.3, "seed": 5},
        )
    ]


@pytest.mark.parametrize("method", METHODS)
def test_every_draft_has_a_confidence_and_nothing_else_has(model, tmp_path, method):
    engine = make_engine(tmp_path, model, method)
    proposals: list[Drafts] = []

    def look(propose: Any, *args: Any) -> Drafts:
        proposals.append(propose(*args))
        return proposals[-1]

    watch(engine, look)
    engine.run(requests(8))
    engine.shutdown()
    assert any(bool(drafts.num_drafts.any()) for drafts in proposals)
    for drafts in proposals:
        is_draft = torch.arange(NUM_DRAFTS) < drafts.num_drafts.unsqueeze(1)
        assert torch.equal(drafts.token_ids >= 0, is_draft)
        assert torch.equal(drafts.confidence_probs > 0, is_draft)
        assert (drafts.confidence_probs <= 1).all()


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
# A second proposal of a draft model has fewer tokens to catch up with.
@pytest.mark.parametrize(
    "method", [pytest.param("draft_model", marks=bit_for_bit), "dspark", "dflash"]
)
def test_a_confidence_does_not_depend_on_its_draft(
    model, tmp_path, monkeypatch, method, draft_sample_method
):
    engine = make_engine(tmp_path, model, method, draft_sample_method)
    sample = DraftSampler.sample
    changed_step: int | None = None

    def sample_other(
        self: DraftSampler,
        logits: torch.Tensor,
        step: int,
        draws: Draws | None,
    ) -> torch.Tensor:
        drafts = sample(self, logits, step, draws)
        return (drafts + 1) % 200 if step == changed_step else drafts

    monkeypatch.setattr(DraftSampler, "sample", sample_other)
    # All drafts in one call are the same ones, but nobody can change one on the way.
    monkeypatch.setattr(DSparkModel, "can_walk", False)
    monkeypatch.setattr(DSparkModel, "maybe_draft", lambda *_: None)
    depends_on_earlier = False

    def look(propose: Any, batch: InputBatch, *args: Any) -> Drafts:
        nonlocal changed_step, depends_on_earlier
        by_step = {}
        for changed_step in (*range(NUM_DRAFTS), None):
            by_step[changed_step] = propose(batch, *args)
        drafts = by_step.pop(None)
        for step, other in by_step.items():
            is_same = other.confidence_probs == drafts.confidence_probs
            assert is_same[:, : step + 1].all()
            depends_on_earlier |= not bool(is_same[:, step + 1 :].all())
            assert (other.token_ids != drafts.token_ids)[:, step].all()
        return drafts

    watch(engine, look)
    engine.run(requests(6))
    engine.shutdown()
    # The drafts of dflash do not look at each other.
    assert depends_on_earlier == (method != "dflash")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_becomes_what_the_target_does(model, tmp_path, method):
    # The drafters are random, so that nothing is known about them at first.
    engine = make_engine(tmp_path, model, method)
    said: dict[str, float] = {}
    trials: list[tuple[float, bool]] = []

    def look(propose: Any, batch: InputBatch, output: Any, *args: Any) -> Drafts:
        num_admitted = batch.layout.cu_num_logits.diff() - 1
        num_accepted = output.num_sampled - 1
        for batch_idx, req_id in enumerate(batch.req_ids):
            if num_admitted[batch_idx] > 0:
                trials.append((said[req_id], bool(num_accepted[batch_idx] > 0)))
        drafts = propose(batch, output, *args)
        firsts = drafts.confidence_probs[:, 0].tolist()
        said.update(zip(batch.req_ids, firsts, strict=True))
        return drafts

    watch(engine, look)
    params = SamplingParams(
        max_tokens=60, temperature=1.5, ignore_eos=True, logit_bias={NAN_ID: -100.0}
    )
    engine.run([(PROMPT, params)] * 24)
    engine.shutdown()
    predicted, happened = torch.tensor(trials[-150:]).double().mean(dim=0).tolist()
    assert predicted == pytest.approx(happened, abs=0.1)


def test_a_drafter_is_not_blamed_for_what_grammars_refuse(model):
    # A drafter that is always right, but for what grammars want.
    keys = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    engine = TinyEngine(model, speculative_config=keys)
    firsts: list[float] = []

    def look(propose: Any, *args: Any) -> Drafts:
        drafts = propose(*args)
        has_drafts = drafts.num_drafts > 0
        firsts.extend(drafts.confidence_probs[has_drafts, 0].tolist())
        return drafts

    watch(engine, look)
    params = {
        "temperature": 0.0,
        "max_tokens": 90,
        "ignore_eos": True,
        "logit_bias": {NAN_ID: -100.0},
    }
    digits = StructuredOutputsParams(regex="[0-9]+")
    plain = (PROMPT, SamplingParams(**params))
    engine.run(
        [plain, *[(PROMPT, SamplingParams(structured_outputs=digits, **params))] * 4]
    )
    firsts.clear()
    engine.run([plain])
    engine.shutdown()
    assert min(firsts) > 0.9
