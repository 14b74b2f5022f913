"""The numbers of an architecture, in Hugging Face's words."""

import json
import os
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import CheckpointError, UnsupportedError

# Each has a model of its own in model_executor/models/registry.py.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# Of a rope type, the numbers that config.json must give.
_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class HfConfig:
    """The part of a config.json that the models read, checked and complete.

    Args:
        architecture: the class name in `architectures`, such as "LlamaForCausalLM".
        head_dim: size of one head; hidden_size / num_attention_heads if not given.
        rope_scaling: the dict of config.json, with `rope_type` set; None for none. A
            GGUF file gives `freq_factors` (one a frequency) in place of its numbers.
        attention_bias: q, k and v projections have a bias.
        attention_out_bias: the output projection has a bias.
        eos_token_ids: of config.json, possibly several.
        torch_dtype: what the checkpoint was saved in.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"


def load_hf_config(path: str) -> HfConfig:
    """Read the architecture's numbers of a model.

    Args:
        path: a directory with a config.json, or a .gguf file.

    Raises:
        CheckpointError: the file is missing or damaged, or one of its numbers is.
        UnsupportedError: the architecture, or a part of it, is not supported.
    """
    if os.path.isfile(path):
        # The GGUF reader brings NumPy, which a directory's config does not need.
        from vllm.transformers_utils.gguf_config import load_gguf_config

        return load_gguf_config(path)
    return parse_hf_config(read_json(path, "config.json"), f"{path}/config.json")


def load_generation_config(path: str) -> dict[str, Any]:
    """Return generation_config.json of a directory; {} if there is none.

    Args:
        path: the directory, the file itself, or a .gguf file, which has none.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    if os.path.isfile(path):
        if not path.endswith(".json"):
            return {}
        return read_json(os.path.dirname(path), os.path.basename(path))
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such file or directory")
    if not os.path.isfile(os.path.join(path, "generation_config.json")):
        return {}
    return read_json(path, "generation_config.json")


def parse_hf_config(raw: dict[str, Any], where: str) -> HfConfig:
    """Check the contents of a config.json and complete them.

    Args:
        raw: the parsed file.
        where: names the file in errors.

    Raises:
        CheckpointError: a number is missing or wrong.
        UnsupportedError: the architecture, or a part of it, is not supported.
    """
    fields = JsonFields(raw, where)
    architecture = _architecture(raw, where)
    _refuse_unsupported(raw, where)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error(
                "hidden_size", f"must be a multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", "must be even")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide num_attention_heads {num_heads}"
        )
    rope_theta, rope_scaling = _rope(raw, where)
    has_bias = fields.boolean("attention_bias", False)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return HfConfig(
        architecture=architecture,
        model_type=str(raw.get("model_type", "")),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        # Qwen2 has these biases without saying so, and none on the output.
        attention_bias=has_bias or is_qwen2,
        attention_out_bias=has_bias and not is_qwen2,
        mlp_bias=fields.boolean("mlp_bias", False),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        torch_dtype=_torch_dtype(raw),
    )


class JsonFields:
    """A JSON object whose values are checked as they are read.

    Args:
        where: names the file in errors.
    """

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def error(self, name: str, reason: str) -> CheckpointError:
        """Return the error that says what is wrong with the value of `name`."""
        value = self._raw.get(name)
        return CheckpointError(f"{self._where}: {name} {reason}, got {value!r:.80}")

    def integer(self, name: str) -> int:
        value = self.optional_integer(name)
        if value is None:
            raise self.error(name, "must be given")
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(name, "must be an integer > 0")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(name, "must be a number > 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, "must be a token id or a list of them")
        return tuple(ids)


def _architecture(raw: dict[str, Any], where: str) -> str:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{where}: architectures must name the model's class")
    architecture = str(architectures[0])
    if architecture in SUPPORTED_ARCHITECTURES:
        return architecture
    code = " through its own code, which is never run" if raw.get("auto_map") else ""
    raise UnsupportedError(
        f"{where}: architecture {architecture!r:.80}{code} is not supported, only "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    """Refuse what would load, and then compute something else than was trained."""
    quantization = raw.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else 0
        )
        raise UnsupportedError(
            f"{where}: quantization_config ({method or 'unknown'}) is not supported: "
            "use the unquantised checkpoint, or a GGUF file"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise UnsupportedError(f"{where}: hidden_act {activation!r} is not supported")
    layer_types = raw.get("layer_types") or ()
    if raw.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise UnsupportedError(f"{where}: sliding-window attention is not supported")


def _rope(raw: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling, from either of the two forms in use.

    Older files hold `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with
    both in it.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: rope_scaling must be an object")
    fields = JsonFields(given, f"{where}: rope_scaling")
    theta = fields.number(
        "rope_theta", JsonFields(raw, where).number("rope_theta", 10000.0)
    )
    for owner in (raw, given):
        if owner.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{where}: partial_rotary_factor is not supported")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedError(
            f"{where}: rope_type {rope_type!r:.80} is not supported, only "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if rope_type == "default":
        return theta, None
    scaling = {
        name: value
        for name, value in given.items()
        if name not in {"type", "rope_theta", "partial_rotary_factor"}
    }
    if "freq_factors" not in scaling:
        for name in _ROPE_NUMBERS[rope_type]:
            if name not in scaling:
                raise fields.error(name, f"must be given for rope_type {rope_type}")
            fields.number(name, 0.0)
    return theta, scaling | {"rope_type": rope_type}


def _torch_dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    return name if name in SUPPORTED_DTYPES else "float32"


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return the JSON object that a model's file holds.

    Raises:
        CheckpointError: the file is not there, not readable or holds something else.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: there is no {name}; a model is a directory with a config.json, "
            "or a .gguf file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
