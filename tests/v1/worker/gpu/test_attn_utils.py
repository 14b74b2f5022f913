"""The KV cache's dtype, and what follows it."""

import pytest
import torch

from vllm.v1.attention.backends.torch_sdpa import TorchSDPABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import (
    allocate_kv_caches,
    choose_kv_cache_dtype,
    group_kv_cache_specs,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "expected"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
        ("float16", torch.float32, torch.float16),
    ],
)
def test_the_cache_has_the_models_dtype_or_the_one_that_is_asked_for(
    cache_dtype, model_dtype, expected
):
    assert choose_kv_cache_dtype(cache_dtype, model_dtype) is expected


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16")]
)
def test_a_blocks_bytes_are_those_that_it_takes(dtype, name):
    specs = {layer: FullAttentionSpec(16, 2, 32, dtype) for layer in ("a", "b")}
    config = KVCacheConfig(5, group_kv_cache_specs(specs))
    caches = allocate_kv_caches(config, TorchSDPABackend, CPU)
    [group] = config.kv_cache_groups
    assert config.dtype_name == name
    assert sum(cache.nbytes for cache in caches.values()) == 5 * group.block_bytes
