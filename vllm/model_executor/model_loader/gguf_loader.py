"""Weights from a GGUF file: blocks as they are, or dequantised as they are read."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from vllm import platforms
from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.model_executor.layers.quantization.weights import Blocks
from vllm.model_executor.model_loader.weight_slots import WeightSlots
from vllm.transformers_utils.config import HfConfig
from vllm.transformers_utils.gguf_config import ROPE_FACTORS_TENSOR
from vllm.transformers_utils.gguf_file import GGUFFile, GGUFTensor

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
# Encoding -> the one in which its blocks are kept.
_KEPT_TYPES = {"Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q8_0": "Q8_0", "Q5_0": "Q8_0"}
# Dequantised at once by a thread: bounds the temporaries, fills a cache line of work.
_CHUNK_VALUES = 1 << 20


def load_gguf(
    path: str,
    config: HfConfig,
    slots: WeightSlots,
    keeps_blocks: bool,
    show_progress: bool,
) -> None:
    """Fill the slots from a GGUF file.

    Args:
        path: of the file.
        config: of its model.
        slots: of the model.
        keeps_blocks: where an encoding can be kept without loss, it is.
        show_progress: show a progress bar.

    Raises:
        CheckpointError: a tensor is missing, truncated, extra or of a wrong shape.
        UnsupportedError: a tensor's encoding is not supported.
    """
    file = GGUFFile(path)
    jobs: list[Callable[[], None]] = []
    for tensor in file.tensors.values():
        if tensor.name != ROPE_FACTORS_TENSOR:
            jobs += _plan_tensor(file, tensor, config, slots, keeps_blocks)
    slots.check_all_taken(path)
    with ThreadPoolExecutor(platforms.num_usable_cpus()) as pool:
        futures = [pool.submit(job) for job in jobs]
        for future in tqdm(
            futures, desc="Loading GGUF checkpoint", disable=not show_progress
        ):
            future.result()


def _plan_tensor(
    file: GGUFFile,
    tensor: GGUFTensor,
    config: HfConfig,
    slots: WeightSlots,
    keeps_blocks: bool,
) -> list[Callable[[], None]]:
    """Take a tensor's slot and return the work that fills it, in chunks of rows."""
    # Imported when needed: it costs a third of a second.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = _checkpoint_name(tensor.name)
    if name is None:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} has no place in the model"
        )
    types = {GGMLQuantizationType[name]: name for name in _SUPPORTED_TYPES}
    if tensor.ggml_type not in types:
        raise UnsupportedError(
            f"{file.path}: tensor {tensor.name} has the type {tensor.ggml_type}, which "
            f"is not supported, only {', '.join(_SUPPORTED_TYPES)}"
        )
    ggml_type = GGMLQuantizationType(tensor.ggml_type)
    slot = slots.take(name, tensor.shape, file.path, shown=tensor.name)
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    width = tensor.shape[-1]
    if width % block_size:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} has rows of {width} values, not a "
            f"multiple of {types[ggml_type]}'s {block_size}"
        )
    num_rows, row_bytes = slot.numel() // width, width // block_size * block_bytes
    raw = file.raw_tensor(tensor.name, num_rows * row_bytes)
    num_heads = _permuted_heads(file, tensor.name, config)
    if num_heads:
        rows = _undo_permutation(raw.reshape(slot.shape[0], -1), num_heads)
        raw = rows.reshape(-1)
    raw, target = raw.reshape(num_rows, row_bytes), slot.view(num_rows, width)
    quant_type = types[ggml_type]
    if keeps_blocks and slot.dim() == 2 and quant_type in _KEPT_TYPES:
        return [partial(_keep_blocks, raw, quant_type, width, slots, name)]
    step = max(_CHUNK_VALUES // width, 1)
    return [
        partial(_dequantise, raw[i : i + step], ggml_type, target[i : i + step])
        for i in range(0, num_rows, step)
    ]


def _checkpoint_name(gguf_name: str) -> str | None:
    """Return a tensor's name in a Hugging Face checkpoint; None if it has none."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer_idx, _, part = rest.partition(".")
    if block != "blk" or not layer_idx.isdigit() or part not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer_idx}.{_LAYER_NAMES[part]}.{kind}"


def _permuted_heads(file: GGUFFile, name: str, config: HfConfig) -> int:
    """Return the heads of a tensor whose rows are permuted; 0 for the others.

    Only the llama architecture is written with the dimensions of a head interleaved.
    """
    if file.architecture != "llama":
        return 0
    part = name.split(".")[-2]
    return {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }.get(part, 0)


def _undo_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return interleaved rows (a0 b0 a1 b1 ...) of each head as halves (a, then b).

    Args:
        rows: [num_heads * head_dim, row_bytes].
    """
    halves = rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
    return halves.reshape(rows.shape)


def _keep_blocks(
    raw: np.ndarray, quant_type: str, width: int, slots: WeightSlots, name: str
) -> None:
    """Hand over [n, row_bytes] of encoded rows."""
    # A copy: torch does not take a read-only view of a mapped file.
    rows = _widen_q5_0(raw) if quant_type == "Q5_0" else raw.copy()
    blocks = Blocks(_KEPT_TYPES[quant_type], torch.from_numpy(rows), width)
    is_taken = slots.put_blocks(name, blocks)
    assert is_taken, f"{name} is a matrix that takes numbers only"


def _widen_q5_0(raw: np.ndarray) -> np.ndarray:
    """Return rows in Q5_0 as the same numbers in Q8_0.

    A block of Q5_0 is a scale, the fifth bits of 32 values, and their other bits: those
    of the first half in the low bits of 16 bytes.
    """
    blocks = raw.reshape(-1, 22)
    scales, fifth_bits, both = np.split(blocks, (2, 6), axis=1)
    low = np.concatenate((both & 15, both >> 4), axis=1).astype(np.int8)
    high = np.unpackbits(fifth_bits, axis=1, bitorder="little").astype(np.int8)
    values = low + 16 * high - 16
    widened = np.concatenate((scales, values.view(np.uint8)), axis=1)
    return widened.reshape(raw.shape[0], -1)


def _dequantise(raw: np.ndarray, ggml_type: int, target: torch.Tensor) -> None:
    """Write [n, row_bytes] of encoded rows into target [n, width]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    if ggml_type in plain:
        values = raw.view(plain[GGMLQuantizationType(ggml_type)])
    else:
        values = dequantize(raw, GGMLQuantizationType(ggml_type))
    # NOTE: torch warns about the read-only view of a mapped file; nothing writes to it.
    if not values.flags.writeable:
        values = values.copy()
    target.copy_(torch.from_numpy(values))
