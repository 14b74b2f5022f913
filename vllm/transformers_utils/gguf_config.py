"""The numbers of an architecture from a GGUF file's metadata."""

from typing import Any

import numpy as np

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.transformers_utils.config import HfConfig, parse_hf_config
from vllm.transformers_utils.gguf_file import GGUFFile

# GGUF architecture -> the class name in a config.json.
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# A tensor that holds no weight: what each rotary frequency is divided by.
ROPE_FACTORS_TENSOR = "rope_freqs.weight"

_GGML_F32 = 0
_NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}


def load_gguf_config(path: str) -> HfConfig:
    """Read the architecture's numbers of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, or a number is missing or wrong.
        UnsupportedError: the architecture is not supported.
    """
    file = GGUFFile(path)
    prefix = file.architecture
    if prefix not in GGUF_ARCHITECTURES:
        raise UnsupportedError(
            f"{path}: GGUF architecture {prefix!r:.80} is not supported, only "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    if file.get("split.count", 1) > 1:
        raise UnsupportedError(
            f"{path}: a split GGUF is not supported: merge its parts"
        )
    if file.get(f"{prefix}.expert_count"):
        raise UnsupportedError(f"{path}: mixture-of-experts models are not supported")
    raw: dict[str, Any] = {
        "architectures": [GGUF_ARCHITECTURES[prefix]],
        "model_type": prefix,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "float16",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(file),
        "rope_scaling": _rope_scaling(file, prefix),
    }
    for name, key in _NUMBERS.items():
        value = file.get(f"{prefix}.{key}")
        if value is not None:
            raw[name] = value
    _check_rope_dimensions(file, prefix, raw)
    if "vocab_size" not in raw:
        raw["vocab_size"] = len(file.get("tokenizer.ggml.tokens", ())) or None
    return parse_hf_config(raw, path)


def _eos_token_ids(file: GGUFFile) -> list[int]:
    """Return the end of text and the end of turn: either ends an answer."""
    ids = [
        file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _check_rope_dimensions(file: GGUFFile, prefix: str, raw: dict[str, Any]) -> None:
    num_dims = file.get(f"{prefix}.rope.dimension_count")
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    if num_dims is None or not isinstance(heads, int) or not heads or not width:
        return
    if num_dims != raw.get("head_dim", width // heads):
        raise UnsupportedError(
            f"{file.path}: rotary embedding of {num_dims} of a head's dimensions is "
            "not supported"
        )


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any] | None:
    factors = _rope_factors(file)
    if factors is not None:
        return {"rope_type": "llama3", "freq_factors": factors}
    scaling = {
        name: file.get(f"{prefix}.rope.scaling.{key}")
        for name, key in (
            ("rope_type", "type"),
            ("factor", "factor"),
            ("original_max_position_embeddings", "original_context_length"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        )
    }
    if scaling["rope_type"] in {None, "none"}:
        return None
    return {name: value for name, value in scaling.items() if value is not None}


def _rope_factors(file: GGUFFile) -> list[float] | None:
    tensor = file.tensors.get(ROPE_FACTORS_TENSOR)
    if tensor is None:
        return None
    if tensor.ggml_type != _GGML_F32 or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name} must be a vector of F32"
        )
    data = file.raw_tensor(tensor.name, 4 * tensor.shape[0])
    return data.view(np.float32).tolist()
