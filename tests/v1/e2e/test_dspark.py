"""A drafter of blocks in the engine: what it drafts, and when."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markers import bit_for_bit
from tests.model_executor.dspark_harness import (
    Block,
    DraftSession,
    load_drafter,
    target_taps,
)
from tests.v1.e2e.tiny_drafter import (
    MASK_ID,
    load_tiny_target,
    make_tiny_config,
    save_drafter,
    save_tiny_drafter,
)
from tests.v1.e2e.tiny_engine import MAX_MODEL_LEN, TinyEngine
from vllm.sampling_params import SamplingParams
from vllm.speculator_training.anchors import build_blocks, sample_anchors
from vllm.speculator_training.losses import (
    LossWeights,
    compute_draft_losses,
    compute_target_probs,
)
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

BLOCK = 4
PROMPT = "The same words stand at the start of a prompt of some length, hello."
# Text that does not repeat itself: an error of one place is seen.
LIVELY = {"temperature": 1.5, "seed": 3, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head says of a draft is passed on as it is."""
    monkeypatch.setattr(ConfidenceEstimator, "observe", lambda *args: None)


@dataclass
class Recorder:
    """Every proposal of an engine: the position of the anchor, drafts, confidences."""

    engine: TinyEngine
    proposals: list[tuple[int, list[int], list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.engine.executor.worker.model_runner
        propose, total_len = runner.speculator.propose, runner.req_states.total_len

        def record(batch: InputBatch, *args: Any) -> Drafts | None:
            drafts = propose(batch, *args)
            if drafts is None:
                return None
            num_known = total_len.gpu[batch.idx_mapping].tolist()
            counts = drafts.num_drafts.tolist()
            for batch_idx, count in enumerate(counts):
                if count:
                    self.proposals.append(
                        (
                            num_known[batch_idx] - 1,
                            drafts.token_ids[batch_idx, :count].tolist(),
                            drafts.confidence_probs[batch_idx, :count].tolist(),
                        )
                    )
            return drafts

        runner.speculator.propose = record

    def take(self) -> list[tuple[int, list[int], list[float]]]:
        taken, self.proposals = self.proposals, []
        return taken


def make_engine(model: Path, drafter: Path, **kwargs: Any) -> TinyEngine:
    keys = {"method": "dspark", "model": str(drafter)} | kwargs.pop("keys", {})
    return TinyEngine(model, speculative_config=keys, **kwargs)


def all_ids(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def draft_alone(
    model: Path,
    drafter: Path,
    ids: list[int],
    anchor: int,
    num_drafts: int | None = None,
) -> tuple[list[int], list[float]]:
    """Return drafts and confidences of a block over a context written at once.

    Args:
        num_drafts: of which the block is made, if it may be shorter.
    """
    target = load_tiny_target(model)
    net = load_drafter(drafter, target)
    if num_drafts is not None:
        net.config = net.config.shortened(num_drafts)
    session = DraftSession(net)
    size = net.config.block_size
    session.write(target_taps(target, net.config, ids[:anchor]), 0, anchor)
    hidden = session.draft(Block(0, ids[anchor], anchor), mask_token_id=MASK_ID)
    assert hidden.shape[1] == size - (not net.config.sample_from_anchor)
    state, tokens, embeddings = net.initial_markov_state(1, hidden), [ids[anchor]], []
    for k in range(hidden.shape[1]):
        embeddings.append(net.markov_embed(torch.tensor(tokens[-1:])))
        bias, state = net.markov_bias(embeddings[-1], hidden[:, k], state)
        logits = net.compute_base_logits(hidden[:, k]) + bias
        best = logits.argmax(-1)
        vocab = net.draft_vocab
        tokens.append(int(best if vocab is None else vocab.map_ids(best)))
    confidence = net.compute_confidence(hidden, torch.stack(embeddings, 1))
    return tokens[1:], confidence.sigmoid()[0].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "rnn", "draft_ids": range(20, 200, 2)},
        {"markov_head_type": "gated", "sample_from_anchor": False, "block_size": 5},
    ],
    ids=["vanilla", "rnn, reduced", "gated, not from the anchor"],
)
@pytest.mark.parametrize("num_drafts", [None, 2])
def test_the_engine_drafts_what_the_drafter_drafts_alone(
    model, tmp_path, changes, num_drafts
):
    drafter = save_tiny_drafter(tmp_path, model, **changes)
    keys = {"num_speculative_tokens": num_drafts} if num_drafts else {}
    # Several chunks of prompt; nearly every draft is rejected.
    engine = make_engine(model, drafter, keys=keys, max_num_batched_tokens=25)
    recorder = Recorder(engine)
    params = SamplingParams(max_tokens=12, **LIVELY)
    [output] = engine.run([(PROMPT, params)])
    engine.shutdown()
    proposals, ids = recorder.take(), all_ids(output)
    assert len(proposals) > 6
    # The last proposal is behind the end.
    for anchor, drafts, confidences in proposals[:-1]:
        tokens, expected = draft_alone(model, drafter, ids, anchor)
        assert drafts == tokens[: len(drafts)]
        assert len(drafts) == (num_drafts or BLOCK)
        assert confidences == pytest.approx(expected[: len(drafts)], abs=1e-5)


@bit_for_bit
def test_a_cached_prefix_has_its_context(model, tmp_path):
    engine = make_engine(model, save_tiny_drafter(tmp_path, model))
    recorder = Recorder(engine)
    request = (PROMPT, SamplingParams(max_tokens=16, **LIVELY))
    [cold] = engine.run([request])
    cold_proposals = recorder.take()
    [warm] = engine.run([request])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert all_ids(warm) == all_ids(cold)
    assert recorder.take() == cold_proposals
    engine.shutdown()


@bit_for_bit
def test_requests_that_share_blocks_within_a_step_share_context(model, tmp_path):
    engine = make_engine(model, save_tiny_drafter(tmp_path, model))
    recorder = Recorder(engine)
    request = (PROMPT, SamplingParams(max_tokens=1, **LIVELY))
    one, other = engine.run([request, request])
    assert {one.num_cached_tokens, other.num_cached_tokens} == {0, 48}
    first, second = recorder.take()
    assert first == second
    engine.shutdown()


@bit_for_bit
def test_drafts_do_not_depend_on_the_logits_that_fit_at_once(
    model, tmp_path, monkeypatch
):
    drafter = save_tiny_drafter(tmp_path, model)
    params = SamplingParams(max_tokens=6, **LIVELY)
    requests = [(f"{number} {PROMPT}", params) for number in range(5)]
    rounds = []
    for num_requests_at_once in (5, 2):
        num_rows = num_requests_at_once * BLOCK
        vocab_size = make_tiny_config(model).backbone.vocab_size
        num_bytes = 4 * vocab_size * num_rows
        monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", num_bytes)
        engine = make_engine(
            model, drafter, keys={"draft_sample_method": "probabilistic"}
        )
        recorder = Recorder(engine)
        engine.run(requests)
        rounds.append(recorder.take())
        engine.shutdown()
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) >= 5 * 3


def test_drafts_end_where_the_drafters_context_does(model, tmp_path):
    drafter = save_tiny_drafter(tmp_path, model)
    engine = make_engine(model, drafter, keys={"max_model_len": 10})
    recorder = Recorder(engine)
    engine.run([([65] * 5, SamplingParams(max_tokens=8, **LIVELY))])
    engine.shutdown()
    lengths = {anchor: len(drafts) for anchor, drafts, _ in recorder.take()}
    assert lengths == {anchor: min(4, 10 - anchor) for anchor in lengths}
    assert max(lengths) == 9


def test_what_cannot_be_drafted_has_no_chance_in_the_draft_distribution(
    model, tmp_path
):
    ids = range(20, 200, 2)
    drafter = save_tiny_drafter(tmp_path, model, draft_ids=ids)
    engine = make_engine(model, drafter, keys={"draft_sample_method": "probabilistic"})
    recorder = Recorder(engine)
    draft_logits = engine.executor.worker.model_runner.speculator.draft_logits
    before = draft_logits.clone()
    engine.run([(PROMPT, SamplingParams(max_tokens=6, temperature=3.0))])
    engine.shutdown()
    [used] = draft_logits[(draft_logits != before).any(dim=(1, 2))]
    chances = used.softmax(dim=-1) > 0
    assert [row.nonzero().squeeze(1).tolist() for row in chances] == [[*ids]] * BLOCK
    assert {i for _, drafts, _ in recorder.take() for i in drafts} <= {*ids}


@pytest.mark.parametrize("max_model_len", [6, 9, 17, MAX_MODEL_LEN])
def test_any_context_can_be_warmed_up_and_filled(model, tmp_path, max_model_len):
    drafter = save_tiny_drafter(tmp_path, model, block_size=6)
    engine = make_engine(model, drafter, max_model_len=max_model_len)
    prompt = [70] * max(max_model_len - 12, 1)
    params = SamplingParams(max_tokens=max_model_len - len(prompt), ignore_eos=True)
    [output] = engine.run([(prompt, params)])
    assert len(all_ids(output)) == max_model_len
    engine.shutdown()


def test_a_broken_drafter_is_not_trusted(model, tmp_path):
    net = DSparkTrainingModel(
        make_tiny_config(model), 256, *weights_of(load_tiny_target(model))
    )
    with torch.no_grad():
        net.norm.weight.fill_(float("nan"))
    request = (PROMPT, SamplingParams(max_tokens=5, **LIVELY))
    plain = TinyEngine(model)
    expected = all_ids(plain.run([request])[0])
    plain.shutdown()
    engine = make_engine(model, save_drafter(tmp_path, net))
    recorder = Recorder(engine)
    assert all_ids(engine.run([request])[0]) == expected
    engine.shutdown()
    assert {c for _, _, confidences in recorder.take() for c in confidences} == {0.0}


def weights_of(target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a drafter shares with its target."""
    weight = target.model.embed_tokens.weight
    return weight, target.lm_head(torch.eye(weight.shape[1])).T


def learn_by_heart(model: Path, ids: list[int], prompt_len: int) -> DSparkTrainingModel:
    target = load_tiny_target(model)
    net = DSparkTrainingModel(make_tiny_config(model), 256, *weights_of(target))
    taps = torch.cat(target_taps(target, net.config, ids), dim=-1).unsqueeze(0)
    token_ids = torch.tensor([ids])
    loss_mask = torch.arange(len(ids)).unsqueeze(0) >= prompt_len - 1
    anchors, is_real = sample_anchors(loss_mask, len(ids) - prompt_len)
    blocks = build_blocks(token_ids, loss_mask, anchors, is_real, BLOCK, MASK_ID)
    labels = blocks.labels.flatten(0, 1)
    predecessors = blocks.predecessors.flatten(0, 1)
    vocab_size = net.config.backbone.vocab_size
    one_hot = torch.nn.functional.one_hot(labels, vocab_size) * 20.0
    target_probs = compute_target_probs(one_hot, None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        hidden = net(taps, blocks.input_ids, blocks.positions).flatten(0, 1)
        losses = compute_draft_losses(
            net.compute_logits(hidden, predecessors),
            target_probs,
            labels,
            blocks.is_valid.flatten(0, 1),
            net.compute_confidence(hidden, predecessors),
            LossWeights(cross_entropy=1.0),
        )
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_a_text_learnt_by_heart_is_accepted_whole(model, tmp_path, draft_sample_method):
    num_steps = 6
    params = SamplingParams(max_tokens=1 + num_steps * (BLOCK + 1), **LIVELY)
    plain = TinyEngine(model)
    [output] = plain.run([(PROMPT, params)])
    plain.shutdown()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    net = learn_by_heart(model, all_ids(output), len(output.prompt_token_ids))
    torch.set_num_threads(num_threads)
    keys = {"draft_sample_method": draft_sample_method}
    engine = make_engine(model, save_drafter(tmp_path, net), keys=keys)
    recorder = Recorder(engine)
    [again] = engine.run([(PROMPT, params)])
    engine.shutdown()
    assert all_ids(again) == all_ids(output)
    # The prompt's step says one token, every other one four drafts and the bonus.
    assert len(recorder.take()) == 1 + num_steps
