"""The shape of the KV cache, as the worker offers it and the scheduler uses it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FullAttentionSpec:
    """The cache of one full-attention layer."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: keys and values."""
        return (
            2 * self.block_size * self.num_kv_heads * self.head_size
        ) * self.dtype.itemsize


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    kv_cache_spec: FullAttentionSpec

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id over all the group's layers."""
        return len(self.layer_names) * self.kv_cache_spec.page_size_bytes


@dataclass(frozen=True)
class KVCacheConfig:
    """How many blocks there are and who uses them.

    Args:
        num_blocks: includes block 0, the null block, which holds no request's tokens.
    """

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    @property
    def dtype_name(self) -> str:
        """Of all keys and values."""
        return str(self.kv_cache_groups[0].kv_cache_spec.dtype).removeprefix("torch.")
