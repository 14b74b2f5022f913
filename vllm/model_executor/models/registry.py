"""Architecture name -> model class, imported when first asked for."""

from importlib import import_module

from vllm.exceptions import UnsupportedError
from vllm.model_executor.layers.dense_decoder import DenseCausalLM

_MODELS = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def supported_architectures() -> tuple[str, ...]:
    """Return the class names that a config.json may have in `architectures`."""
    return tuple(_MODELS)


def get_model_class(architecture: str) -> type[DenseCausalLM]:
    """Return the class of an architecture.

    Raises:
        UnsupportedError: there is none.
    """
    if architecture not in _MODELS:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported, only {', '.join(_MODELS)}"
        )
    module = import_module(f"vllm.model_executor.models.{_MODELS[architecture]}")
    return getattr(module, architecture)
