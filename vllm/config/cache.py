"""The KV cache's size and policy."""

from dataclasses import dataclass

CACHE_DTYPES = ("auto", "float32", "float16")


@dataclass(frozen=True)
class CacheConfig:
    """How large the KV cache is.

    The first of these that is set decides: `num_gpu_blocks_override`,
    `kv_cache_memory_bytes`, `cpu_kvcache_space_bytes` (CPU only), else a share of the
    memory: `gpu_memory_utilization` of the device on CUDA, of what is free on CPU.

    Args:
        block_size: tokens a block.
        cache_dtype: one of CACHE_DTYPES; auto is the model's dtype.
        gpu_memory_utilization: share of the device's memory for weights and cache.
        num_gpu_blocks_override: blocks, the null block included.
        enable_prefix_caching: reuse the blocks of equal prompt beginnings.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    cpu_kvcache_space_bytes: int | None = None
    enable_prefix_caching: bool = True
