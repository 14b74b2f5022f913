"""The KV cache's memory and the attention metadata of a step."""

import torch

from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.worker.gpu.input_batch import InputBatch


def choose_kv_cache_dtype(cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in the cache.

    Args:
        cache_dtype: of the configuration; auto is the model's.
        model_dtype: of activations.
    """
    return model_dtype if cache_dtype == "auto" else getattr(torch, cache_dtype)


def group_kv_cache_specs(
    specs: dict[str, FullAttentionSpec],
) -> tuple[KVCacheGroupSpec, ...]:
    """Join layers of equal shape into groups, in the order of their first layer."""
    layers_of: dict[FullAttentionSpec, list[str]] = {}
    for layer_name, spec in specs.items():
        layers_of.setdefault(spec, []).append(layer_name)
    return tuple(
        KVCacheGroupSpec(tuple(names), spec) for spec, names in layers_of.items()
    )


def allocate_kv_caches(
    config: KVCacheConfig, backend: type[AttentionBackend], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return one paged cache a layer.

    The memory is not written: attention never reads a slot that no token has filled,
    and on a CPU untouched pages cost nothing.
    """
    caches = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        shape = backend.get_kv_cache_shape(
            config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        for layer_name in group.layer_names:
            caches[layer_name] = torch.empty(shape, dtype=spec.dtype, device=device)
    return caches


def build_attn_metadata(batch: InputBatch, block_size: int) -> AttentionMetadata:
    """Describe the step to the attention layers.

    Args:
        batch: of the step.
        block_size: tokens a cache block.
    """
    layout = batch.layout
    return AttentionMetadata(
        query_start_loc=layout.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        num_tokens=layout.num_tokens,
        max_query_len=layout.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_size=block_size,
    )
