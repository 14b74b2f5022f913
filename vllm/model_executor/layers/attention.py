"""Attention of one layer over its part of the paged cache."""

import torch

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layer import Layer
from vllm.v1.attention.backend import AttentionBackend


class Attention(Layer):
    """Stores new keys and values, then attends to all of the request's.

    Args:
        layer_name: names the layer's cache in the forward context.
        num_heads: query heads.
        head_size: of queries, keys and values.
        scale: of the scores.
        num_kv_heads: key and value heads; divides num_heads.
        backend: does the work on the model's device.
    """

    def __init__(
        self,
        layer_name: str,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        backend: type[AttentionBackend],
    ) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.backend = backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return the heads' outputs.

        Args:
            q: [T, num_heads * head_size], rows possibly strided.
            k: [T, num_kv_heads * head_size], as q.
            v: as k.

        Returns:
            [T, num_heads * head_size]; zeros in a forward pass without metadata.
        """
        context = get_forward_context()
        metadata = context.attn_metadata
        num_tokens = q.shape[0]
        out = q.new_empty(num_tokens, self.num_heads, self.head_size)
        if metadata is None:
            return out.zero_().view(num_tokens, -1)
        self.store(k, v, metadata.slot_mapping)
        kv_cache = context.kv_caches[self.layer_name]
        self.backend.attend(q.view(out.shape), kv_cache, metadata, self.scale, out)
        return out.view(num_tokens, -1)

    def store(
        self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values to the layer's cache in the forward context.

        Args:
            k: [T, num_kv_heads * head_size], rows possibly strided.
            v: as k.
            slot_mapping: [T] int64; -1 writes nothing.
        """
        kv_shape = (k.shape[0], self.num_kv_heads, self.head_size)
        self.backend.write_kv_cache(
            k.view(kv_shape),
            v.view(kv_shape),
            get_forward_context().kv_caches[self.layer_name],
            slot_mapping,
        )
