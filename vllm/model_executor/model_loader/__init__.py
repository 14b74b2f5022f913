"""Build the model that the configuration names, and fill it with weights."""

import os

import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import UnsupportedError
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.quantization.methods import (
    QuantizationMethod,
    get_drafter_quantization_method,
    get_quantization_method,
)
from vllm.model_executor.model_loader.weight_slots import WeightSlots
from vllm.model_executor.models.interfaces import CausalLM
from vllm.model_executor.models.registry import get_model_class
from vllm.v1.attention.selector import get_attn_backend


def load_model(
    vllm_config: VllmConfig,
    device: torch.device,
    method: QuantizationMethod | None = None,
) -> CausalLM:
    """Return the model, ready to run on `device`.

    Args:
        vllm_config: names the model.
        device: where it runs.
        method: what becomes of the weights; None: what the configuration says.

    Raises:
        CheckpointError: the weights are missing, damaged or do not fit the model.
        UnsupportedError: the architecture, format or encoding is not supported.
    """
    model_config = vllm_config.model_config
    dtype = getattr(torch, model_config.dtype)
    if method is None:
        is_gguf = os.path.isfile(model_config.model)
        method = get_quantization_method(
            model_config.quantization, is_gguf, device, dtype
        )
    model_class = get_model_class(model_config.hf_config.architecture)
    with torch.device(device), torch.no_grad():
        model = model_class(vllm_config, get_attn_backend(device, dtype))
    # Weights were made on the device; tables that are computed were not.
    model.to(device).requires_grad_(False).eval()
    slots = WeightSlots(model)
    with torch.no_grad():
        _fill(vllm_config, slots, method)
    # The slots' views would keep the unpacked weights alive.
    del slots
    for module in model.modules():
        if isinstance(module, Linear):
            module.process_weights_after_loading(method)
    return model


def find_drafter_quantization(
    target_config: ModelConfig, path: str, device: torch.device
) -> QuantizationMethod:
    """Return what becomes of the weights of a drafter.

    Args:
        target_config: of the model that it drafts for.
        path: of the drafter, a GGUF file or a directory.
        device: where both run.
    """
    return get_drafter_quantization_method(
        target_config.quantization,
        os.path.isfile(target_config.model),
        os.path.isfile(path),
        device,
        getattr(torch, target_config.dtype),
    )


def _fill(
    vllm_config: VllmConfig, slots: WeightSlots, method: QuantizationMethod
) -> None:
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    path, load_format = model_config.model, load_config.load_format
    is_file = os.path.isfile(path)
    if load_format == "auto":
        load_format = "gguf" if is_file else "safetensors"
    if load_format == "dummy":
        # Imported by need: each format has a library of its own.
        from vllm.model_executor.model_loader.dummy_loader import load_dummy

        return load_dummy(slots, model_config.seed)
    if (load_format == "gguf") != is_file:
        raise UnsupportedError(
            f"{path}: load_format {load_format} needs "
            + ("a .gguf file" if load_format == "gguf" else "a directory")
        )
    show_progress = load_config.use_tqdm_on_load
    if load_format == "gguf":
        from vllm.model_executor.model_loader.gguf_loader import load_gguf

        return load_gguf(
            path, model_config.hf_config, slots, method.keeps_blocks, show_progress
        )
    from vllm.model_executor.model_loader.safetensors_loader import load_safetensors

    return load_safetensors(path, slots, show_progress)
