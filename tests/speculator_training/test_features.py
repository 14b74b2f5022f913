from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.dspark_harness import VERIFIER, target_taps
from tests.model_executor.dspark_harness import make_config as make_draft_config
from tests.model_executor.harness import Session, make_config
from tests.model_executor.hf_reference import tiny_model
from vllm.exceptions import CheckpointError
from vllm.speculator_training.checkpoint import save_speculator
from vllm.speculator_training.dataset import Sequence
from vllm.speculator_training.drafter import (
    default_target_layers,
    make_drafter,
    open_drafter,
)
from vllm.speculator_training.features import Features, FeatureStore, TargetRunner
from vllm.speculator_training.settings import TrainingError

CONFIG = make_draft_config()
LAYER_IDS = CONFIG.aux_hidden_state_layer_ids
TOKENS = torch.arange(3, 43)
ONE = Sequence(TOKENS, 5, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder) -> TargetRunner:
    return TargetRunner(make_config(str(folder)), LAYER_IDS, max_tokens=64)


def make_store(runner, path, num_sequences=3, dtype=torch.float32) -> FeatureStore:
    sequences = [Sequence(TOKENS + i, 5, 0.0) for i in range(num_sequences)]
    return FeatureStore(runner, sequences, len(LAYER_IDS) + 1, path, dtype)


def test_states_are_those_of_the_model(runner):
    (features,) = runner.run([ONE])
    taps = target_taps(runner.target, CONFIG, TOKENS.tolist())
    assert torch.equal(features.states[:, :-1], torch.stack(taps, dim=1))
    runner.target.set_aux_hidden_state_layers(())
    logits = Session(runner.target).logits(TOKENS.tolist())
    runner.target.set_aux_hidden_state_layers(LAYER_IDS)
    assert torch.equal(runner.compute_logits(features.states[:, -1]), logits)
    expected = logits.logsumexp(dim=-1)
    expected[: ONE.num_prompt_tokens] = 0
    torch.testing.assert_close(features.normalizers, expected)


def test_a_sequence_does_not_see_the_one_before_it(runner):
    (first,) = runner.run([ONE])
    others = [replace(ONE, token_ids=TOKENS.flip(0)[:n]) for n in (3, 40, 17) * 4]
    for place in (0, 7, 12):
        company = [*others[:place], ONE, *others[place:]]
        assert torch.equal(runner.run(company)[place].states, first.states)


def test_narrow_products_are_near_those_of_float32(runner, folder):
    config = make_config(str(folder))
    narrow = TargetRunner(config, LAYER_IDS, 64, torch.bfloat16)
    (features,), (exact,) = narrow.run([ONE]), runner.run([ONE])
    assert features.states.dtype == torch.float32
    assert not torch.equal(features.states, exact.states)
    error = (features.states - exact.states).norm() / exact.states.norm()
    assert float(error) < 0.1
    torch.testing.assert_close(
        features.normalizers, exact.normalizers, rtol=0.02, atol=0.05
    )
    # What is lent to the drafter is not narrowed.
    assert torch.equal(narrow.head_rows(None), runner.head_rows(None))


def test_rows_of_the_output_layer_are_its_weights(runner, folder):
    weight = load_file(folder / "model.safetensors")["lm_head.weight"]
    ids = torch.tensor([2, 50, 95])
    assert torch.equal(runner.head_rows(None), weight)
    assert torch.equal(runner.head_rows(ids), weight[ids])


def test_kept_states_are_read_back_in_a_later_run(runner, tmp_path, monkeypatch):
    path = str(tmp_path / "states.bin")
    make_store(runner, path).fill()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda sequences: pytest.fail("computed again"))
        store = make_store(runner, path)
        store.fill()
        (kept,) = store.get([1])
    (again,) = runner.run([store.sequences[1]])
    assert torch.equal(kept.states, again.states)
    assert torch.equal(kept.normalizers, again.normalizers)


def test_states_of_other_sequences_are_computed_anew(runner, tmp_path):
    path = str(tmp_path / "states.bin")
    make_store(runner, path, num_sequences=2).fill()
    store = make_store(runner, path)
    store.fill()
    (kept,), (again,) = store.get([2]), runner.run([store.sequences[2]])
    assert torch.equal(kept.states, again.states)


def test_taps_are_measured_over_the_answers(runner):
    store = make_store(runner, None)
    means, deviations = store.measure_taps([0, 2])
    taps = torch.cat([f.states[5:, :-1].flatten(1) for f in store.get([0, 2])]).double()
    torch.testing.assert_close(means, taps.mean(dim=0))
    expected = taps.std(dim=0, unbiased=False)
    torch.testing.assert_close(deviations, expected, rtol=1e-5, atol=1e-6)


def test_states_beyond_half_precision_are_told(runner, tmp_path, monkeypatch):
    store = make_store(runner, str(tmp_path / "states.bin"), dtype=torch.float16)
    states = torch.full((len(TOKENS), len(LAYER_IDS) + 1, 64), 1e5)
    large = Features(states, torch.zeros(len(TOKENS)))
    monkeypatch.setattr(runner, "run", lambda sequences: [large] * len(sequences))
    with pytest.raises(TrainingError, match="another --feature-dtype"):
        store.fill()


def test_layers_are_tapped_evenly_and_never_the_last():
    assert default_target_layers(36) == (1, 9, 17, 25, 33)
    assert default_target_layers(4) == (1,)
    assert default_target_layers(2) == (-1, 0)
    assert default_target_layers(1) == (-1,)


def test_a_drafter_is_opened_with_its_own_vocabulary_and_tables(runner, tmp_path):
    ids = torch.tensor([1, 4, 50])
    config = replace(CONFIG, draft_vocab_size=3)
    model = make_drafter(config, runner, ids, 64, seed=7)
    save_speculator(str(tmp_path), model, VERIFIER, ids)
    opened, opened_ids = open_drafter(str(tmp_path), config, runner, 64)
    assert torch.equal(opened_ids, ids)
    assert torch.equal(opened.fc.weight, model.fc.weight)
    assert torch.equal(opened.head, runner.head_rows(ids))

    path = tmp_path / "model.safetensors"
    head = torch.full((3, 64), 2.0)
    save_file(load_file(path) | {"lm_head.weight": head}, path)
    opened, _ = open_drafter(str(tmp_path), config, runner, 64)
    assert torch.equal(opened.head, head)


def test_a_drafter_of_another_shape_is_refused(runner, tmp_path):
    model = make_drafter(CONFIG, runner, None, 64, seed=0)
    save_speculator(str(tmp_path), model, VERIFIER)
    with pytest.raises(CheckpointError, match="markov_head"):
        open_drafter(str(tmp_path), replace(CONFIG, markov_rank=4), runner, 64)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        open_drafter(str(tmp_path), CONFIG, runner, 64)
