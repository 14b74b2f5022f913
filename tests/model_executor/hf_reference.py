"""Hugging Face models as oracles, from our files or with random weights."""

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str, seed: int = 0, **options: object) -> PreTrainedModel:
    """Return a random model in which no weight is a special case such as 0 or 1."""
    config_class, model_class = FAMILIES[family]
    numbers = TINY | options
    if family == "qwen2":
        numbers.pop("head_dim")
    torch.manual_seed(seed)
    model = model_class(config_class(**numbers)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def llama_from_gguf(path: str) -> LlamaForCausalLM:
    """Build the model with the gguf package's reader, not with ours."""
    reader = gguf.GGUFReader(path)

    def number(key: str) -> float:
        return reader.fields[key].contents()

    heads = number("llama.attention.head_count")
    kv_heads = number("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=number("llama.vocab_size"),
        hidden_size=number("llama.embedding_length"),
        intermediate_size=number("llama.feed_forward_length"),
        num_hidden_layers=number("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=number("llama.context_length"),
        rms_norm_eps=number("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": number("llama.rope.freq_base"),
        },
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, num in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                values = unpermute(values, num)
        state[name] = torch.from_numpy(np.array(values))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    _recompute_rotary(model, config)
    return model.eval()


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo what the converter of llama checkpoints to GGUF does to rows of q and k."""
    size = values.shape[0] // num_heads
    rows = np.empty_like(values)
    for head in range(num_heads):
        for j in range(size // 2):
            rows[head * size + j] = values[head * size + 2 * j]
            rows[head * size + size // 2 + j] = values[head * size + 2 * j + 1]
    return rows


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Do what that converter does: interleave the halves of each head."""
    size = values.shape[0] // num_heads
    rows = np.empty_like(values)
    for head in range(num_heads):
        for j in range(size // 2):
            rows[head * size + 2 * j] = values[head * size + j]
            rows[head * size + 2 * j + 1] = values[head * size + size // 2 + j]
    return rows


def _recompute_rotary(model: LlamaForCausalLM, config: LlamaConfig) -> None:
    """Replace the frequencies, which were made on the meta device."""
    rotary_class = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary_class(config)


def write_gguf(
    path: str,
    model: PreTrainedModel,
    arch: str,
    ggml_type: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    metadata: dict[str, object] | None = None,
    types: dict[str, str] | None = None,
) -> None:
    """Write a transformers model as GGUF.

    Matrices are in `ggml_type`, or in what `types` has for the part that their name
    ends with; vectors are in F32.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name in drop:
            continue
        values = tensor.float().numpy()
        if arch == "llama" and "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        part = gguf_name.split(".")[-2]
        _add_tensor(writer, gguf_name, values, (types or {}).get(part, ggml_type))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, ggml_type: str
) -> None:
    if values.ndim == 1 or ggml_type == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        return
    kind = gguf.GGMLQuantizationType[ggml_type]
    data = gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
