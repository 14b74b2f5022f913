from dataclasses import replace

import pytest
import torch

from tests.model_executor.dspark_harness import (
    MASK,
    Block,
    DraftSession,
    make_config,
    make_target,
    save_and_load,
    step_logits,
    target_taps,
)
from vllm.speculator_training.anchors import build_blocks, sample_anchors
from vllm.speculator_training.losses import (
    LossWeights,
    compute_draft_losses,
    compute_target_probs,
)
from vllm.speculator_training.modeling import DSparkTrainingModel

NUM_SEQUENCES = 10
NUM_TOKENS = 16
BLOCK = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def token_ids():
    # Of four tokens, so that only the context tells which sequence an anchor is in.
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 4, (NUM_SEQUENCES, NUM_TOKENS), generator=generator)


def new_model(target) -> DSparkTrainingModel:
    embedding = target.model.embed_tokens.weight
    head = target.lm_head(torch.eye(64)).T
    return DSparkTrainingModel(make_config(), 256, embedding, head, seed=1)


@pytest.fixture(scope="module")
def one_thread():
    # Products this small cost more to hand out than to do.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def overfit(target, token_ids, one_thread):
    """Return a drafter that knows some sequences by heart, and its losses."""
    model = new_model(target)
    taps = torch.stack(
        [
            torch.cat(target_taps(target, model.config, ids.tolist()), -1)
            for ids in token_ids
        ]
    )
    # The first three tokens are a prompt.
    loss_mask = torch.arange(NUM_TOKENS).expand(NUM_SEQUENCES, -1) >= 3
    anchors, is_real = sample_anchors(loss_mask, NUM_TOKENS - 4)
    blocks = build_blocks(token_ids, loss_mask, anchors, is_real, BLOCK, MASK)
    labels = blocks.labels.flatten(0, 1)
    predecessors = blocks.predecessors.flatten(0, 1)
    # A target that is as sure of the sequence as the drafter is to become.
    one_hot = torch.nn.functional.one_hot(labels, 96) * 20.0
    target_probs = compute_target_probs(one_hot, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    history = []
    for _ in range(120):
        hidden = model(taps, blocks.input_ids, blocks.positions).flatten(0, 1)
        losses = compute_draft_losses(
            model.compute_logits(hidden, predecessors),
            target_probs,
            labels,
            blocks.is_valid.flatten(0, 1),
            model.compute_confidence(hidden, predecessors),
            LossWeights(cross_entropy=1.0),
        )
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        history.append(float(losses.total.detach()))
    return model, history


def accepted_length(
    model, target, sequence, position: int, shift: int = 0, layer_shift: int = 0
) -> int:
    """Return drafts that continue a sequence, plus the bonus token.

    Args:
        shift: places by which the block is read wrongly.
        layer_shift: layers by which the target is tapped wrongly.
    """
    ids = sequence.tolist()
    session = DraftSession(model)
    layer_ids = tuple(i + layer_shift for i in model.config.target_layer_ids)
    config = replace(model.config, target_layer_ids=layer_ids)
    taps = target_taps(target, config, ids)
    session.write(taps, 0, position)
    hidden = session.draft(Block(0, ids[position], position))
    state, previous = model.initial_markov_state(1, hidden), ids[position]
    for k in range(BLOCK):
        e = model.markov_embed(torch.tensor([previous]))
        bias, state = model.markov_bias(e, hidden[:, k], state)
        logits = model.compute_base_logits(hidden[:, k]) + bias
        previous = int(logits.argmax())
        if previous != ids[position + 1 + k + shift]:
            return k + 1
    return BLOCK + 1


def test_initial_weights_depend_on_the_seed_and_start_without_a_bias(target):
    one, same = new_model(target), new_model(target)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    hidden, ids = torch.randn(1, BLOCK, 64), torch.zeros(1, BLOCK, dtype=torch.int64)
    with torch.no_grad():
        plain = hidden @ one.head.T
        torch.testing.assert_close(one.compute_logits(hidden, ids), plain)


def test_embeddings_of_the_target_are_neither_trained_nor_saved(target):
    model = new_model(target)
    names = set(dict(model.named_parameters()))
    assert names == set(model.state_dict())
    assert not any("embed" in name or name == "head.weight" for name in names)


def test_every_weight_gets_a_gradient(overfit):
    # Left by the last step of training.
    grads = {name: p.grad for name, p in overfit[0].named_parameters()}
    assert not [name for name, grad in grads.items() if grad is None]
    assert not [name for name, grad in grads.items() if grad.abs().max() == 0]


def test_padding_behind_a_sequence_changes_nothing(target):
    model = new_model(target)
    taps = torch.randn(1, 10, 3 * 64)
    padded = torch.cat((taps, torch.full((1, 5, 3 * 64), 50.0)), dim=1)
    positions = torch.tensor([[[6, 7, 8, 9]]])
    input_ids = torch.tensor([[[5, MASK, MASK, MASK]]])
    with torch.no_grad():
        usual = model(taps, input_ids, positions)
        torch.testing.assert_close(model(padded, input_ids, positions), usual)


def test_a_block_without_context_is_finite(target):
    model = new_model(target)
    with torch.no_grad():
        hidden = model(
            torch.randn(1, 4, 3 * 64),
            torch.full((1, 1, BLOCK), MASK),
            torch.arange(BLOCK)[None, None],
        )
    assert hidden.isfinite().all()


def test_training_lowers_the_loss(overfit):
    _, history = overfit
    assert history[-1] < 0.1 * history[0]


def mean_accepted_length(model, target, token_ids, **shifts: int) -> float:
    lengths = [
        accepted_length(model, target, sequence, position, **shifts)
        for sequence in token_ids
        for position in (4, 7, NUM_TOKENS - BLOCK - 2)
    ]
    return sum(lengths) / len(lengths)


def test_sequences_learnt_by_heart_are_accepted_whole(
    overfit, target, token_ids, tmp_path
):
    drafter = save_and_load(tmp_path, overfit[0], target)
    assert mean_accepted_length(drafter, target, token_ids) == BLOCK + 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_blocks_read_one_place_too_early_or_late_are_noticed(
    shift, overfit, target, token_ids, tmp_path
):
    drafter = save_and_load(tmp_path, overfit[0], target)
    # One in four tokens is right by chance.
    assert mean_accepted_length(drafter, target, token_ids, shift=shift) < 2


def test_layers_tapped_one_too_deep_are_noticed(overfit, target, token_ids, tmp_path):
    drafter = save_and_load(tmp_path, overfit[0], target)
    assert mean_accepted_length(drafter, target, token_ids, layer_shift=1) < 4.5


def test_confidence_is_near_one_where_everything_is_accepted(
    overfit, target, token_ids, tmp_path
):
    drafter = save_and_load(tmp_path, overfit[0], target)
    session, ids = DraftSession(drafter), token_ids[0].tolist()
    session.write(target_taps(target, drafter.config, ids), 0, 8)
    hidden = session.draft(Block(0, ids[8], 8))
    _, logits = step_logits(drafter, hidden, token_ids[:1, 8:12])
    assert (logits.sigmoid() > 0.8).all()
