import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.model_executor.dspark_harness import (
    VERIFIER,
    Block,
    DraftSession,
    load_drafter,
    make_config,
    make_drafter,
    make_target,
    save_and_load,
)
from vllm.speculator_training import checkpoint
from vllm.speculator_training.checkpoint import load_training_weights, save_speculator


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def test_a_saved_drafter_gives_the_same_outputs_when_trained_on(target, tmp_path):
    model = make_drafter(make_config(), target)
    save_speculator(str(tmp_path), model, VERIFIER)
    other = make_drafter(make_config(), target, seed=5)
    load_training_weights(str(tmp_path), other)
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)


def test_units_of_the_taps_are_folded_into_the_saved_weights(target, tmp_path):
    model = make_drafter(make_config(), target)
    model.tap_scales = torch.logspace(2, -3, model.fc.weight.shape[1])
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, 6, len(model.tap_scales), generator=generator)
    taps = taps / model.tap_scales
    inputs = torch.tensor([[[4, 0, 0]]]), torch.tensor([[[6, 7, 8]]])
    expected = model(taps, *inputs)

    save_speculator(str(tmp_path), model, VERIFIER)
    other = make_drafter(make_config(), target, seed=5)
    load_training_weights(str(tmp_path), other)
    torch.testing.assert_close(other(taps, *inputs), expected, rtol=1e-3, atol=1e-3)
    model.round_to(torch.float32)
    assert torch.equal(model(taps, *inputs), other(taps, *inputs))
    model.round_to(torch.bfloat16)
    assert torch.equal(model.fc.weight, other.fc.weight.bfloat16().float())


def test_half_precision_halves_the_file_and_keeps_the_states_near(target, tmp_path):
    model = make_drafter(make_config(), target)
    wide = save_and_load(tmp_path / "wide", model, target)
    save_speculator(str(tmp_path / "half"), model, VERIFIER, dtype=torch.bfloat16)
    half = load_drafter(tmp_path / "half", target)
    sizes = [
        (tmp_path / name / "model.safetensors").stat().st_size
        for name in ("wide", "half")
    ]
    assert sizes[1] < 0.55 * sizes[0]
    taps = [torch.randn(6, 64) for _ in range(3)]
    states = []
    for drafter in (wide, half):
        session = DraftSession(drafter)
        session.write(taps, 0, 6)
        states.append(session.draft(Block(0, 4, 6)))
    # Eight bits of mantissa over two layers.
    assert (states[0] - states[1]).abs().max() < 0.1 * states[0].abs().max()


def test_a_reduced_vocabulary_is_named_token_by_token(target, tmp_path):
    ids = torch.tensor([1, 50])
    config = replace(make_config(), draft_vocab_size=2)
    model = make_drafter(config, target, ids)
    with pytest.raises(AssertionError, match="token by token"):
        save_speculator(str(tmp_path), model, VERIFIER)
    save_speculator(str(tmp_path), model, VERIFIER, ids)
    assert load_file(tmp_path / "model.safetensors")["d2t"].tolist() == [1, 49]


def test_a_directory_is_never_half_written(target, tmp_path, monkeypatch):
    model = make_drafter(make_config(), target)
    save_speculator(str(tmp_path), model, VERIFIER)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(tensors, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_speculator(str(tmp_path), model, VERIFIER)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 4
