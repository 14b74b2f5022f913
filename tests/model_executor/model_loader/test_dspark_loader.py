from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.dspark_harness import (
    CPU,
    NUM_POSITIONS,
    load_drafter,
    make_config,
    make_drafter,
    make_target,
    save_and_load,
    write_deepspec_config,
)
from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.dspark_loader import load_dspark_model
from vllm.model_executor.model_loader.weight_slots import WeightSlots
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.transformers_utils.configs.dspark import load_dspark_config
from vllm.v1.attention.selector import get_attn_backend

WEIGHTS = "model.safetensors"
# The shapes of a published drafter for a target of 36 layers and width 2560.
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "block_size": 7,
    "markov_rank": 256,
}
QWEN3_4B_LAYER = {
    "input_layernorm.weight": (2560,),
    "post_attention_layernorm.weight": (2560,),
    "self_attn.q_proj.weight": (4096, 2560),
    "self_attn.k_proj.weight": (1024, 2560),
    "self_attn.v_proj.weight": (1024, 2560),
    "self_attn.o_proj.weight": (2560, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (9728, 2560),
    "mlp.up_proj.weight": (9728, 2560),
    "mlp.down_proj.weight": (2560, 9728),
}
QWEN3_4B_TENSORS = {
    "embed_tokens.weight": (151936, 2560),
    "lm_head.weight": (151936, 2560),
    "fc.weight": (2560, 12800),
    "hidden_norm.weight": (2560,),
    "norm.weight": (2560,),
    "markov_head.markov_w1.weight": (151936, 256),
    "markov_head.markov_w2.weight": (151936, 256),
    "confidence_head.proj.weight": (1, 2816),
    "confidence_head.proj.bias": (1,),
    **{
        f"layers.{i}.{name}": shape
        for i in range(5)
        for name, shape in QWEN3_4B_LAYER.items()
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def saved(tmp_path, target):
    """Return a drafter's directory and its tensors."""
    save_and_load(tmp_path, make_drafter(make_config(), target), target)
    return tmp_path, read(tmp_path)


def read(folder) -> dict[str, torch.Tensor]:
    # Cloned: what is loaded is a view of a file that tests write over.
    tensors = load_file(folder / WEIGHTS)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def slots_of(**changes: object) -> dict[str, tuple[int, ...]]:
    config = make_config(**(QWEN3_4B | changes))
    with torch.device("meta"):
        model = DSparkModel(
            config,
            16,
            get_attn_backend(CPU, torch.float32),
            torch.float32,
            has_embedding=True,
            has_head=True,
            has_vocab_map=False,
        )
    return {name: tuple(slot.shape) for name, slot in WeightSlots(model)}


def test_tensors_of_a_published_drafter_all_have_a_place_of_their_shape():
    slots = slots_of()
    assert slots == QWEN3_4B_TENSORS
    num_weights = sum(torch.Size(shape).numel() for shape in slots.values())
    assert num_weights == pytest.approx(1.393e9, rel=1e-3)


def test_gated_and_rnn_heads_have_their_tensors():
    gated = {
        "markov_head.gate_proj.weight": (256, 2816),
        "markov_head.gate_proj.bias": (256,),
    }
    assert slots_of(markov_head_type="gated") == QWEN3_4B_TENSORS | gated
    rnn = {
        "markov_head.joint_proj.weight": (768, 3072),
        "markov_head.joint_proj.bias": (768,),
    }
    assert slots_of(markov_head_type="rnn") == QWEN3_4B_TENSORS | rnn


def test_a_missing_tensor_is_named(saved, target):
    folder, tensors = saved
    del tensors["hidden_norm.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"missing tensor hidden_norm\.weight"):
        load_drafter(folder, target)


def test_an_unknown_tensor_is_named(saved, target):
    folder, tensors = saved
    save_file(tensors | {"extra.weight": torch.zeros(1)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"extra\.weight has no place"):
        load_drafter(folder, target)


def test_embeddings_of_another_size_are_refused(saved, target):
    folder, tensors = saved
    save_file(tensors | {"embed_tokens.weight": torch.zeros(90, 64)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"\[90, 64\].*\[96, 64\]"):
        load_drafter(folder, target)


def test_a_drafters_own_embeddings_and_head_are_used(saved, target):
    folder, tensors = saved
    torch.manual_seed(1)
    own = {
        "embed_tokens.weight": torch.randn(96, 64),
        "lm_head.weight": torch.randn(96, 64),
    }
    save_file(tensors | own, folder / WEIGHTS)
    drafter = load_drafter(folder, target)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(
        drafter.compute_base_logits(hidden), hidden @ own["lm_head.weight"].T
    )
    assert torch.equal(drafter.embed_tokens.weight, own["embed_tokens.weight"])
    # The target keeps its own.
    assert not torch.equal(target.model.embed_tokens.weight, own["embed_tokens.weight"])


def reduced(target, folder, ids: list[int]):
    config = replace(make_config(), draft_vocab_size=len(ids))
    token_ids = torch.tensor(ids)
    return save_and_load(
        folder, make_drafter(config, target, token_ids), target, token_ids
    )


def test_vocabulary_maps_are_stored_as_offsets_and_flags(target, tmp_path):
    reduced(target, tmp_path, [2, 3, 90])
    tensors = read(tmp_path)
    assert tensors["d2t"].tolist() == [2, 2, 88]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 3, 90]
    assert "lm_head.weight" not in tensors


def test_a_reduced_head_of_its_own_is_used(target, tmp_path):
    reduced(target, tmp_path, [2, 3, 90])
    head = torch.randn(3, 64)
    save_file(read(tmp_path) | {"lm_head.weight": head}, tmp_path / WEIGHTS)
    hidden = torch.randn(2, 64)
    actual = load_drafter(tmp_path, target).compute_base_logits(hidden)
    torch.testing.assert_close(actual, hidden @ head.T)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", torch.tensor([2, 2, 94]), "not the 3 of t2d"),
        ("d2t", torch.tensor([2, 1, 88]), "not the 3 of t2d"),
        ("t2d", torch.ones(96, dtype=torch.bool), "not the 96 of t2d"),
        ("d2t", torch.tensor([2.0, 2.0, 88.0]), "tensor d2t holds torch.float32"),
    ],
)
def test_wrong_vocabulary_maps_are_refused(name, value, message, target, tmp_path):
    reduced(target, tmp_path, [2, 3, 90])
    save_file(read(tmp_path) | {name: value}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target)


def test_a_missing_vocabulary_map_is_named(target, tmp_path):
    reduced(target, tmp_path, [2, 3, 90])
    tensors = {name: t for name, t in read(tmp_path).items() if name != "d2t"}
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="missing tensor d2t"):
        load_drafter(tmp_path, target)


def test_a_deepspec_directory_loads_like_a_speculators_one(saved, target):
    folder, _ = saved
    of_speculators = load_drafter(folder, target)
    write_deepspec_config(folder)
    config = load_dspark_config(str(folder))
    assert config == of_speculators.config
    drafter = load_dspark_model(str(folder), config, target, NUM_POSITIONS, CPU)
    taps = [torch.randn(2, 64) for _ in range(3)]
    assert torch.equal(
        drafter.combine_hidden_states(taps), of_speculators.combine_hidden_states(taps)
    )
