from dataclasses import replace

import pytest
import torch

from tests.model_executor.dspark_harness import make_config as make_draft_config
from tests.model_executor.harness import Session, make_config
from tests.model_executor.hf_reference import tiny_model
from vllm.speculator_training.batches import Drafting
from vllm.speculator_training.dataset import Sequence
from vllm.speculator_training.drafter import make_drafter
from vllm.speculator_training.features import FeatureStore, TargetRunner
from vllm.speculator_training.initial import fit_target, start_from_target
from vllm.speculator_training.losses import LossWeights

CONFIG = make_draft_config()
LAYER_IDS = CONFIG.aux_hidden_state_layer_ids
NUM_PROMPT_TOKENS = 4
FITTED, JUDGED = list(range(12)), list(range(12, 16))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> FeatureStore:
    """Return greedy answers of a tiny target to prompts of all kinds."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3", num_hidden_layers=4).save_pretrained(folder)
    runner = TargetRunner(make_config(str(folder)), LAYER_IDS, max_tokens=64)
    runner.target.set_aux_hidden_state_layers(())
    sequences = []
    for start in range(16):
        prompt = [(5 * start + i) % 90 + 3 for i in range(NUM_PROMPT_TOKENS)]
        answer = Session(runner.target).greedy(prompt, 30)
        sequences.append(Sequence(torch.tensor([*prompt, *answer]), len(prompt), 0.0))
    runner.target.set_aux_hidden_state_layers(LAYER_IDS)
    return FeatureStore(runner, sequences, len(LAYER_IDS) + 1, None, torch.float32)


def judge(store, model) -> float:
    drafting = Drafting(model, store, None, 64)
    batch = drafting.run(JUDGED, torch.Generator().manual_seed(0))
    losses = drafting.compute_losses(batch, LossWeights(distillation=1.0))
    return float(losses.distillation)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="vanilla"),
        pytest.param({"markov_head_type": "gated"}, id="gated"),
        pytest.param({"markov_head_type": "rnn"}, id="rnn"),
        pytest.param(
            {"markov_rank": 0, "confidence_head_with_markov": False}, id="no table"
        ),
    ],
)
def test_a_start_from_the_target_is_better_than_a_random_one(store, changes):
    config = replace(CONFIG, **changes)
    model = make_drafter(config, store.runner, None, 80, seed=0)
    before = judge(store, model)
    start_from_target(model, store, FITTED)
    assert all(weight.isfinite().all() for weight in model.state_dict().values())
    assert judge(store, model) < before - 0.3


def test_the_fit_is_the_least_squares_of_the_answers(store):
    model = make_drafter(CONFIG, store.runner, None, 80, seed=0)
    fit = fit_target(model, store, FITTED)
    errors, spread = 0.0, 0.0
    taps_mean = torch.cat(
        [f.states[NUM_PROMPT_TOKENS:, :-1].flatten(1) for f in store.get(FITTED)]
    ).mean(dim=0)
    for idx in FITTED:
        (features,) = store.get([idx])
        anchors = torch.arange(NUM_PROMPT_TOKENS, len(features.states))
        taps = features.states[:, :-1].flatten(1)[anchors - 1] - taps_mean
        tokens = store.sequences[idx].token_ids[anchors]
        embedded = model.embedding[tokens] - fit.predecessor_mean
        told = (
            fit.constant
            + (taps * fit.tap_scales) @ fit.of_taps.T
            + embedded @ fit.of_predecessor.T
        )
        states = features.states[anchors, -1]
        errors += float((told - states).square().sum())
        spread += float((states - fit.constant).square().sum())
    assert errors < 0.5 * spread


def test_what_is_common_reads_the_same_from_every_token(store):
    model = make_drafter(CONFIG, store.runner, None, 80, seed=0)
    fit = fit_target(model, store, FITTED)
    read = [
        (f.states[NUM_PROMPT_TOKENS:, :-1].flatten(1) * fit.tap_scales) @ fit.common
        for f in store.get(FITTED)
    ]
    # A random model's tokens have little in common.
    assert float(torch.cat(read).mean()) == pytest.approx(1.0, abs=0.3)
    assert float(torch.cat(read).std()) < 0.6


def test_heads_look_at_the_token_before_the_block(store):
    model = make_drafter(CONFIG, store.runner, None, 80, seed=0)
    start_from_target(model, store, FITTED)
    (features,) = store.get([JUDGED[0]])
    taps = features.states[:, :-1].flatten(1) * model.tap_scales
    attention, anchor = model.layers[-1].self_attn, 20
    context = model.hidden_norm(model.fc(taps))[:anchor]
    block = torch.full((CONFIG.block_size,), CONFIG.mask_token_id)
    x = model.layers[-1].input_layernorm(model.embedding[block])
    places = torch.arange(anchor, anchor + len(block))
    norms = attention.q_norm, attention.k_norm
    queries = attention._heads(attention.q_proj(x), norms[0], model.cos_sin[places])
    keys = attention._heads(attention.k_proj(context), norms[1], model.cos_sin[:anchor])
    scores = queries[:, 0] @ keys[:, 0].T
    assert (scores[1:].argmax(dim=-1) >= anchor - 2).all()
