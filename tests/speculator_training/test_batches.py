from dataclasses import replace

import pytest
import torch

from tests.model_executor.dspark_harness import make_config as make_draft_config
from tests.model_executor.harness import Session, make_config
from tests.model_executor.hf_reference import tiny_model
from vllm.speculator_training import batches
from vllm.speculator_training.batches import Drafting
from vllm.speculator_training.dataset import Sequence
from vllm.speculator_training.drafter import make_drafter
from vllm.speculator_training.features import FeatureStore, TargetRunner
from vllm.speculator_training.losses import LossWeights, compute_draft_losses
from vllm.speculator_training.rollout import roll_out

CONFIG = make_draft_config()
LAYER_IDS = CONFIG.aux_hidden_state_layer_ids
NUM_PROMPT_TOKENS = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> FeatureStore:
    """Return answers that the target gave greedily, of different lengths."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3", num_hidden_layers=4).save_pretrained(folder)
    runner = TargetRunner(make_config(str(folder)), LAYER_IDS, max_tokens=64)
    runner.target.set_aux_hidden_state_layers(())
    sequences = []
    for start, length in ((3, 20), (40, 12), (70, 27)):
        prompt = list(range(start, start + NUM_PROMPT_TOKENS))
        answer = Session(runner.target).greedy(prompt, length)
        ids = torch.tensor([*prompt, *answer])
        sequences.append(Sequence(ids, NUM_PROMPT_TOKENS, 0.0))
    runner.target.set_aux_hidden_state_layers(LAYER_IDS)
    return FeatureStore(runner, sequences, len(LAYER_IDS) + 1, None, torch.float32)


def make_drafting(store, ids=None, num_anchors=64) -> Drafting:
    size = CONFIG.draft_vocab_size if ids is None else len(ids)
    config = replace(CONFIG, draft_vocab_size=size)
    model = make_drafter(config, store.runner, ids, 80, seed=0)
    return Drafting(model, store, ids, num_anchors)


def test_each_label_is_what_its_state_predicts(store):
    drafting = make_drafting(store)
    batch = drafting.run([0, 1, 2], torch.Generator().manual_seed(0))
    # Each answer token is an anchor, but for the last.
    assert len(batch.labels) == 19 + 11 + 26
    predicted = drafting.target_probs(batch.final)[batch.final_idx].argmax(dim=-1)
    assert torch.equal(predicted[batch.is_valid], batch.labels[batch.is_valid])
    # No state is asked for twice.
    assert len(batch.final) <= sum(len(s.token_ids) for s in store.sequences)


def test_a_sequence_gives_the_same_in_any_company(store):
    drafting = make_drafting(store)
    alone = drafting.run([1], torch.Generator().manual_seed(0))
    together = drafting.run([2, 1], torch.Generator().manual_seed(0))
    # Padding changes the shapes of products, and so their rounding.
    torch.testing.assert_close(together.hidden[-11:], alone.hidden)
    assert torch.equal(together.labels[-11:], alone.labels)


def test_a_token_outside_the_vocabulary_has_no_draft_id(store):
    ids = store.sequences[0].answer_ids.unique()[:4]
    drafting = make_drafting(store, ids)
    batch = drafting.run([0], torch.Generator().manual_seed(0))
    draft_labels = drafting.draft_labels(batch.labels)
    is_known = torch.isin(batch.labels, ids)
    assert torch.equal(draft_labels >= 0, is_known)
    assert torch.equal(
        drafting.target_ids(draft_labels[is_known]), batch.labels[is_known]
    )
    losses = drafting.compute_losses(batch, LossWeights())
    assert losses.total.isfinite()


def test_losses_of_a_few_blocks_at_a_time_are_those_of_all_at_once(store, monkeypatch):
    ids = store.sequences[0].token_ids.unique()
    drafting = make_drafting(store, ids)
    model, weights = drafting.model, LossWeights()
    with torch.no_grad():
        model.markov_head.markov_w2.weight.normal_()
        model.confidence_head.proj.weight.normal_()
    batch = drafting.run([0, 2], torch.Generator().manual_seed(0))
    whole = compute_draft_losses(
        model.compute_logits(batch.hidden, batch.predecessors),
        drafting.target_probs(batch.final)[batch.final_idx],
        drafting.draft_labels(batch.labels),
        batch.is_valid,
        model.compute_confidence(batch.hidden, batch.predecessors),
        weights,
    )
    whole.total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(batches, "_NUM_BLOCKS_AT_ONCE", 7)
    batch = drafting.run([0, 2], torch.Generator().manual_seed(0))
    losses = drafting.backward(batch, weights)
    for name in ("total", "cross_entropy", "total_variation", "confidence"):
        torch.testing.assert_close(getattr(losses, name), getattr(whole, name).detach())
    torch.testing.assert_close(losses.acceptance, whole.acceptance)
    torch.testing.assert_close(
        {name: p.grad for name, p in model.named_parameters()},
        expected,
        rtol=1e-4,
        atol=1e-6,
    )


def test_a_drafter_that_says_the_answers_is_always_accepted(store):
    """Train on the answers until they are known by heart, then replay them."""
    drafting = make_drafting(store)
    model = drafting.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(150):
        batch = drafting.run([0, 1, 2], torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        drafting.backward(batch, LossWeights(cross_entropy=1.0))
        optimizer.step()
    (rollouts,) = roll_out(drafting, [0, 1, 2], batch_size=2, seed=0)
    torch.set_num_threads(num_threads)
    # Whole blocks of four: anchors up to the fifth token from the end.
    assert len(rollouts.is_accepted) == 16 + 8 + 23
    assert rollouts.is_greedy
    assert rollouts.accepted_length > 4.8
