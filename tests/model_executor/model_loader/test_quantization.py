"""Weights that stay quantised: what the loader makes of them, and what they compute."""

import pytest
import torch

from tests.markers import bit_for_bit
from tests.model_executor.harness import Session, load, make_config
from tests.model_executor.hf_reference import tiny_model, write_gguf
from vllm import _custom_ops as ops
from vllm.exceptions import UnsupportedError
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.quantization.methods import get_quantization_method
from vllm.model_executor.layers.quantization.weights import (
    Blocks,
    DenseWeight,
    QuantizedWeight,
    StackedWeight,
)
from vllm.model_executor.model_loader import load_model

TOKENS = [1, 17, 5, 90, 33, 33, 8, 2, 64, 71, 12, 95, 0, 44, 21, 7, 50, 3, 81, 29]
KEPT = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
CPU = torch.device("cpu")


@pytest.fixture
def write(tmp_path):
    def write(ggml_type: str, family: str = "llama", **options: object) -> str:
        path = str(tmp_path / f"{ggml_type}.gguf")
        write_gguf(path, tiny_model(family, **options), family, ggml_type)
        return path

    return write


@pytest.fixture
def tiny_folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def linears(model) -> dict[str, Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Linear)}


def kinds(model) -> set[type]:
    return {type(layer._packed) for layer in linears(model).values()}


@pytest.mark.parametrize("ggml_type", KEPT)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_kept_blocks_are_the_numbers_of_the_file(write, ggml_type, is_tied):
    path = write(ggml_type, tie_word_embeddings=is_tied)
    kept, dequantised = load(path, quantization="gguf"), load(path)
    assert kinds(kept) == {QuantizedWeight}
    assert kinds(dequantised) == {DenseWeight}
    for name, layer in linears(dequantised).items():
        assert torch.equal(linears(kept)[name].unpack(), layer.unpack()), name
    table = dequantised.model.embed_tokens
    ids = torch.tensor(TOKENS)
    assert torch.equal(kept.model.embed_tokens.weight, table.weight)
    assert torch.equal(kept.model.embed_tokens(ids), table(ids))


@pytest.mark.parametrize("ggml_type", KEPT)
def test_kept_blocks_give_the_logits_up_to_rounded_activations(write, ggml_type):
    path = write(ggml_type)
    expected = Session(load(path)).logits(TOKENS)
    actual = Session(load(path, quantization="gguf")).logits(TOKENS)
    # Steps of 1/127 of a block's largest, through two layers of random weights.
    error = (actual - expected).square().mean().sqrt()
    assert 0 < error < 0.05 * expected.square().mean().sqrt()


@bit_for_bit
@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_logits_do_not_depend_on_the_chunks_of_a_prompt(write, quantization):
    model = load(write("Q4_1"), quantization=quantization)
    whole = Session(model).logits(TOKENS)
    session = Session(model)
    chunks = [TOKENS[:1], TOKENS[1:8], TOKENS[8:]]
    assert torch.equal(torch.cat([session.logits(chunk) for chunk in chunks]), whole)


def test_shards_of_different_types_are_multiplied_apart(tmp_path):
    path = str(tmp_path / "mixed.gguf")
    types = {"attn_v": "Q8_0", "attn_k": "F16"}
    write_gguf(path, tiny_model("qwen3"), "qwen3", "Q4_1", types=types)
    kept, dequantised = load(path, quantization="gguf"), load(path)
    assert StackedWeight in kinds(kept)
    for name, layer in linears(dequantised).items():
        assert torch.equal(linears(kept)[name].unpack(), layer.unpack()), name
    expected = Session(dequantised).logits(TOKENS)
    error = (Session(kept).logits(TOKENS) - expected).square().mean().sqrt()
    assert 0 < error < 0.05 * expected.square().mean().sqrt()


def test_other_types_are_dequantised(write):
    path = write("Q5_1", "qwen3")
    model = load(path, quantization="gguf")
    assert kinds(model) == {DenseWeight}
    assert torch.equal(
        Session(model).logits(TOKENS), Session(load(path)).logits(TOKENS)
    )


def test_a_tied_table_is_held_once(write):
    model = load(write("Q8_0", tie_word_embeddings=True), quantization="gguf")
    assert model.lm_head._packed is model.model.embed_tokens._quantized
    assert sum(p.numel() for p in model.model.embed_tokens.parameters()) == 0


def test_int8_rounds_every_matrix_by_rows_and_leaves_the_table(tiny_folder):
    plain, rounded = load(tiny_folder), load(tiny_folder, quantization="int8")
    assert kinds(rounded) == {QuantizedWeight}
    for name, layer in linears(plain).items():
        weight = layer.unpack()
        step = weight.abs().amax(1, keepdim=True) / 127
        error = (linears(rounded)[name].unpack() - weight).abs()
        assert (error <= 0.501 * step).all(), name
        assert error.max() > 0
    assert torch.equal(
        rounded.model.embed_tokens.weight, plain.model.embed_tokens.weight
    )
    expected = Session(plain).logits(TOKENS)
    error = (Session(rounded).logits(TOKENS) - expected).square().mean().sqrt()
    assert 0 < error < 0.05 * expected.square().mean().sqrt()


@pytest.mark.parametrize("is_gguf", [False, True])
def test_auto_keeps_blocks_where_the_operators_multiply_them(is_gguf):
    method = get_quantization_method("auto", is_gguf, CPU, torch.float32)
    assert method.keeps_blocks == (is_gguf and ops.has_cpu_ops())
    assert not get_quantization_method(
        "auto", is_gguf, CPU, torch.bfloat16
    ).keeps_blocks
    cuda = torch.device("cuda")
    assert not get_quantization_method(
        "auto", is_gguf, cuda, torch.float32
    ).keeps_blocks


def test_what_does_not_go_together_is_refused(tiny_folder, write):
    def refusal(path: str, **options: str) -> str:
        with pytest.raises(UnsupportedError) as error:
            load_model(make_config(path, **options), CPU)
        return str(error.value)

    assert "needs a GGUF file" in refusal(tiny_folder, quantization="gguf")
    for quantization in ("gguf", "int8"):
        message = refusal(write("Q4_0"), quantization=quantization, dtype="bfloat16")
        assert "float32" in message
        assert "bfloat16" in message


def test_a_bias_takes_no_blocks():
    layer = Linear(64, {"a": 96}, bias=True, dtype=torch.float32)
    blocks = Blocks("Q4_0", torch.zeros(96, 36, dtype=torch.uint8), 64)
    assert layer.put_blocks("a.weight", blocks)
    assert not layer.put_blocks("a.bias", blocks)
    assert not layer.put_blocks("b.weight", blocks)
