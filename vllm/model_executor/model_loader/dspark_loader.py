"""Load a DSpark drafter beside the target that it drafts for."""

import torch

from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.model_executor.layers.quantization.methods import (
    UNQUANTIZED,
    QuantizationMethod,
)
from vllm.model_executor.model_loader.safetensors_loader import (
    list_tensor_names,
    load_safetensors,
)
from vllm.model_executor.model_loader.weight_slots import WeightSlots
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.transformers_utils.configs.dspark import DSparkConfig
from vllm.v1.attention.selector import get_attn_backend

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_VOCAB_MAP = "d2t"


def load_dspark_model(
    folder: str,
    config: DSparkConfig,
    target: DenseCausalLM,
    num_positions: int,
    device: torch.device,
    method: QuantizationMethod = UNQUANTIZED,
) -> DSparkModel:
    """Return the drafter of a directory, ready to run in the target's dtype.

    Args:
        folder: with safetensors files.
        config: of that directory, which fits the target.
        target: lends the embeddings and output layer that the directory lacks.
        num_positions: of the longest context, plus a block.
        method: what becomes of the weights; what is lent stays as the target has it.

    Raises:
        CheckpointError: the weights are missing, damaged or do not fit the model.
        UnsupportedError: the weights are in another format or quantised.
    """
    names = list_tensor_names(folder)
    with torch.device(device), torch.no_grad():
        model = DSparkModel(
            config,
            num_positions,
            get_attn_backend(device, target.dtype),
            target.dtype,
            has_embedding=_EMBEDDING in names,
            has_head=_HEAD in names,
            has_vocab_map=_VOCAB_MAP in names or config.has_reduced_vocab,
        )
    model.to(device).requires_grad_(False).eval()
    slots = WeightSlots(model)
    with torch.no_grad():
        load_safetensors(folder, slots, show_progress=False)
        if config.is_rope_interleaved:
            _undo_interleaving(model)
        # The slots' views would keep the unpacked weights alive.
        del slots
        model.process_weights_after_loading(
            target.model.embed_tokens, target.lm_head, method
        )
    return model


def _undo_interleaving(model: DSparkModel) -> None:
    """Reorder queries and keys of every head for the rotation of halves.

    Scores are products of rotated queries and keys: one order of both is as good as
    another.
    """
    head_dim = model.config.backbone.head_dim
    order = torch.arange(head_dim).view(-1, 2).T.flatten()
    for attention in model.attentions:
        for name, slot in attention.qkv_proj.weight_slots().items():
            if not name.startswith("v_proj"):
                heads = slot.unflatten(0, (-1, head_dim))
                slot.copy_(heads[:, order].flatten(0, 1))
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:
                norm.weight.copy_(norm.weight[order])
