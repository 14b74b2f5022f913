import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.harness import Session, load, make_config
from tests.model_executor.hf_reference import (
    reference_logits,
    tiny_model,
    write_gguf,
)
from vllm.exceptions import CheckpointError, UnsupportedError

TOKENS = [1, 17, 5, 90, 33, 33, 8, 2, 64, 71, 12, 95, 0, 44, 21, 7, 50, 3, 81, 29]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}

VARIANTS = {
    "llama-untied": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim-not-hidden-over-heads": ("llama", {"head_dim": 48}),
    "qwen2-untied": ("qwen2", {"num_attention_heads": 2}),
    "qwen2-tied": ("qwen2", {"num_attention_heads": 2, "tie_word_embeddings": True}),
    "qwen2-rope-yarn": ("qwen2", {"num_attention_heads": 2, "rope_parameters": YARN}),
    "qwen3-untied": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the order of float32 additions, at logits of size 10."""
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def tiny_llama(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("family", "options"), VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(family, options, tmp_path):
    reference = tiny_model(family, **options)
    reference.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert_same_logits(
        Session(model).logits(TOKENS), reference_logits(reference, TOKENS)
    )


def test_logits_of_a_chunked_prompt_equal_those_of_a_whole_one(tiny_llama):
    model = load(str(tiny_llama))
    whole = Session(model).logits(TOKENS)
    session = Session(model)
    chunks = [session.logits(TOKENS[i : i + 7]) for i in range(0, len(TOKENS), 7)]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-4, atol=1e-4)


def test_sharded_checkpoint_equals_transformers(tmp_path):
    reference = tiny_model("qwen3")
    reference.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(str(tmp_path))
    assert_same_logits(
        Session(model).logits(TOKENS), reference_logits(reference, TOKENS)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype, tiny_llama):
    wide = Session(load(str(tiny_llama))).logits(TOKENS)
    narrow = Session(load(str(tiny_llama), dtype=dtype)).logits(TOKENS)
    assert narrow.dtype is torch.float32
    # 8 bits of mantissa over two layers and a sum of 64 products.
    assert (narrow - wide).abs().max() < 0.1 * wide.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_gguf_equals_transformers(family, is_tied, tmp_path):
    heads = {"num_attention_heads": 2} if family == "qwen2" else {}
    reference = tiny_model(family, tie_word_embeddings=is_tied, **heads)
    path = str(tmp_path / "model.gguf")
    write_gguf(path, reference, family)
    assert_same_logits(
        Session(load(path)).logits(TOKENS), reference_logits(reference, TOKENS)
    )


def test_gguf_and_safetensors_of_the_same_weights_give_the_same_bits(tiny_llama):
    path = str(tiny_llama / "model.gguf")
    write_gguf(path, tiny_model("llama"), "llama")
    of_gguf = Session(load(path))
    of_safetensors = Session(load(str(tiny_llama)))
    assert torch.equal(of_gguf.logits(TOKENS), of_safetensors.logits(TOKENS))
    assert of_gguf.greedy([5], 40) == of_safetensors.greedy([5], 40)


@pytest.mark.parametrize(
    "ggml_type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
)
def test_gguf_encoding_equals_the_dequantised_weights(ggml_type, tmp_path):
    import gguf

    reference = tiny_model("qwen3")
    path = str(tmp_path / "model.gguf")
    write_gguf(path, reference, "qwen3", ggml_type)
    kind = gguf.GGMLQuantizationType[ggml_type]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                data = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(data, kind).copy()))
    assert_same_logits(
        Session(load(path)).logits(TOKENS), reference_logits(reference, TOKENS)
    )


@pytest.mark.parametrize("ggml_type", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantised_row_by_row(ggml_type, tmp_path):
    """The package cannot write these, so random blocks stand for a matrix."""
    import gguf

    from vllm.model_executor.model_loader.gguf_loader import _dequantise

    kind = gguf.GGMLQuantizationType[ggml_type]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    target = torch.full((3, 2 * block_size), math.nan)
    _dequantise(raw, kind, target)
    assert torch.equal(target, torch.from_numpy(gguf.dequantize(raw, kind)))
    assert target.isfinite().all()


def test_gguf_rope_factors_are_a_scaling_and_not_a_weight(tmp_path):
    reference = tiny_model("llama", rope_parameters=LLAMA3)
    plain = 1 / 10000.0 ** (np.arange(0, 32, 2) / 32)
    factors = plain / reference.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7
    path = str(tmp_path / "model.gguf")
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    write_gguf(path, reference, "llama", extra=extra)
    assert_same_logits(
        Session(load(path)).logits(TOKENS), reference_logits(reference, TOKENS)
    )


def test_gguf_yarn_scaling_equals_transformers(tmp_path):
    reference = tiny_model("llama", rope_parameters=YARN)
    path = str(tmp_path / "model.gguf")
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    write_gguf(path, reference, "llama", metadata=metadata)
    assert_same_logits(
        Session(load(path)).logits(TOKENS), reference_logits(reference, TOKENS)
    )


def test_dummy_weights_depend_on_the_seed_alone(tiny_llama):
    path = str(tiny_llama)
    first, again, other = (
        Session(load(path, load_format="dummy", seed=seed)).logits(TOKENS)
        for seed in (1, 1, 2)
    )
    assert first.isfinite().all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_tied_checkpoint_may_hold_the_output_layer_too(tmp_path):
    reference = tiny_model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(96, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(
        Session(load(str(tmp_path))).logits(TOKENS),
        reference_logits(reference, TOKENS),
    )


def change_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(path, **options) -> str:
    """Return the one line with which a checkpoint is refused."""
    with pytest.raises(UnsupportedError) as caught:
        load(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_tensor_is_named(tiny_llama):
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tiny_llama, lambda tensors: tensors.pop(name))
    assert refusal(tiny_llama) == f"{tiny_llama}: missing tensor {name}"


def test_many_missing_tensors_are_counted(tiny_llama):
    change_tensors(tiny_llama, lambda t: [t.pop(n) for n in list(t) if ".1." in n])
    assert refusal(tiny_llama).endswith(" and 6 more")


def test_extra_tensor_is_named(tiny_llama):
    name = "model.layers.2.mlp.up_proj.weight"
    change_tensors(tiny_llama, lambda t: t.update({name: torch.zeros(2, 2)}))
    message = refusal(tiny_llama)
    assert "model.safetensors" in message
    assert f"tensor {name} has no place" in message


def test_embedding_of_another_vocabulary_is_refused(tiny_llama):
    name = "model.embed_tokens.weight"
    change_tensors(tiny_llama, lambda t: t.update({name: torch.zeros(97, 64)}))
    assert f"tensor {name} has the shape [97, 64]" in refusal(tiny_llama)
    assert "needs [96, 64]" in refusal(tiny_llama)


def test_quantised_tensor_is_refused(tiny_llama):
    name = "model.norm.weight"
    quantised = torch.zeros(64, dtype=torch.int8)
    change_tensors(tiny_llama, lambda t: t.update({name: quantised}))
    assert f"tensor {name} is quantised" in refusal(tiny_llama)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1], ids=str)
def test_truncated_safetensors_is_refused(kept, tiny_llama):
    path = tiny_llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path}: is truncated or damaged" in refusal(tiny_llama)


def test_missing_shard_is_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    message = refusal(tmp_path)
    assert f"is in {shard.name}, which is not there" in message


def test_tensor_that_the_index_promises_and_a_shard_lacks_is_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    assert f"{shard}: tensor {name} is not there" in refusal(tmp_path)


def test_index_cannot_point_out_of_the_directory(tiny_llama):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    path = tiny_llama / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert "outside the directory" in refusal(tiny_llama)


def test_damaged_index_is_refused(tiny_llama):
    (tiny_llama / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "is not an index of weights" in refusal(tiny_llama)


def test_pickles_are_refused(tiny_llama):
    (tiny_llama / "model.safetensors").unlink()
    (tiny_llama / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "convert them to safetensors" in refusal(tiny_llama)


def test_directory_without_weights_is_refused(tiny_llama):
    (tiny_llama / "model.safetensors").unlink()
    assert "there is no model.safetensors" in refusal(tiny_llama)


@pytest.mark.parametrize("dropped", ["output_norm.weight", "blk.1.ffn_up.weight"])
def test_tensor_missing_from_gguf_is_named(dropped, tmp_path):
    path = str(tmp_path / "model.gguf")
    write_gguf(path, tiny_model("llama"), "llama", drop=(dropped,))
    assert f"{path}: missing tensor" in refusal(path)


def test_unknown_tensor_in_gguf_is_named(tmp_path):
    path = str(tmp_path / "model.gguf")
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write_gguf(path, tiny_model("llama"), "llama", extra=extra)
    assert f"{path}: tensor blk.0.attn_sinks.weight has no place" in refusal(path)


def test_gguf_tensor_of_an_unsupported_type_is_named(tmp_path):
    path = str(tmp_path / "model.gguf")
    drop = ("output_norm.weight",)
    extra = {"output_norm.weight": np.zeros(64, np.int8)}
    write_gguf(path, tiny_model("llama"), "llama", extra=extra, drop=drop)
    message = refusal(path)
    assert "tensor output_norm.weight" in message
    assert "is not supported, only F32" in message


def test_gguf_tensor_of_another_shape_is_refused(tmp_path):
    path = str(tmp_path / "model.gguf")
    extra = {"output_norm.weight": np.zeros(65, np.float32)}
    drop = ("output_norm.weight",)
    write_gguf(path, tiny_model("llama"), "llama", extra=extra, drop=drop)
    assert "tensor output_norm.weight has the shape [65]" in refusal(path)


def test_truncated_gguf_names_the_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(str(path), tiny_model("llama"), "llama")
    path.write_bytes(path.read_bytes()[:-5000])
    message = refusal(path)
    assert message.startswith(f"{path}: tensor ")
    assert "truncated" in message


@pytest.mark.parametrize(
    ("load_format", "needs"), [("gguf", "a .gguf file"), ("safetensors", "a directory")]
)
def test_load_format_that_is_not_the_files_is_refused(load_format, needs, tmp_path):
    reference = tiny_model("llama")
    reference.save_pretrained(tmp_path)
    gguf_path = tmp_path / "model.gguf"
    write_gguf(str(gguf_path), reference, "llama")
    path = tmp_path if load_format == "gguf" else gguf_path
    assert f"load_format {load_format} needs {needs}" in refusal(
        path, load_format=load_format
    )


def test_a_refusal_is_a_checkpoint_error(tiny_llama):
    (tiny_llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load(str(tiny_llama))


def test_configuration_of_the_harness_is_what_the_directory_says(tiny_llama):
    assert make_config(str(tiny_llama)).model_config.hf_config.head_dim == 32
