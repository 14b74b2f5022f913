"""Keys and values of a drafter's context, of all its layers in one product."""

from collections.abc import Sequence

import torch

from vllm._cpu_ops_drafter import ContextPiece
from vllm.model_executor.layers.dense_decoder import SelfAttention
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import Linear


class ContextKV(Layer):
    """Pushes fused target states through each layer's own k and v projections.

    Made from loaded layers, before their weights are packed.

    Args:
        attentions: of the draft layers, all of one shape.
    """

    def __init__(self, attentions: Sequence[SelfAttention]) -> None:
        super().__init__()
        # A tuple, so that the layers are not registered a second time.
        self.attentions = tuple(attentions)
        q_size, kv_size, _ = self.attentions[0].split_sizes
        self.kv_size = kv_size
        projections = [attention.qkv_proj for attention in self.attentions]
        # All keys before all values, so that one rotation takes all keys.
        parts = [slice(q_size, q_size + kv_size), slice(q_size + kv_size, None)]
        weights = [p.weight for p in projections if p.weight is not None]
        stacked = torch.cat([weight[part] for part in parts for weight in weights])
        biases = [
            p.bias[part] for part in parts for p in projections if p.bias is not None
        ]
        with stacked.device:
            self.proj = Linear(
                stacked.shape[1],
                {"context_kv": stacked.shape[0]},
                bias=bool(biases),
                dtype=stacked.dtype,
            )
        self.proj.weight_slots()["context_kv.weight"].copy_(stacked)
        if self.proj.bias is not None:
            self.proj.bias.data = torch.cat(biases)

    def forward(
        self,
        fused: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> None:
        """Write keys and values to the layers' caches in the forward context.

        Args:
            fused: [T, hidden_size], the target's states after fusion.
            positions: [T] int64, absolute, of the tokens that the states are of.
            slot_mapping: [T] int64; -1 writes nothing, wherever the token stands. None:
                they are computed alone, for the memory that it takes.
        """
        rotary = self.attentions[0].rotary
        # A token past the drafter's context has no rotation of its own.
        positions = positions.clamp(max=rotary.cos_sin_cache.shape[0] - 1)
        keys, values = self.proj(fused).chunk(2, dim=-1)
        keys_of, values_of = keys.split(self.kv_size, 1), values.split(self.kv_size, 1)
        for attention, k in zip(self.attentions, keys_of, strict=True):
            if attention.k_norm is not None:
                heads = k.unflatten(-1, (-1, attention.head_dim))
                attention.k_norm.forward_in_place(heads)
        rotary.rotate_keys(positions, keys)
        if slot_mapping is None:
            return
        for attention, k, v in zip(self.attentions, keys_of, values_of, strict=True):
            attention.attn.store(k, v, slot_mapping)


def join_pieces(pieces: Sequence[ContextPiece]) -> ContextPiece:
    """Return one piece that is written as these one after another are."""
    if len(pieces) == 1:
        return pieces[0]
    taps = zip(*(piece.taps for piece in pieces), strict=True)
    slots = torch.cat([piece.slot_mapping for piece in pieces])
    return ContextPiece(
        [torch.cat(parts) for parts in taps],
        torch.cat([piece.positions for piece in pieces]),
        _drop_overwritten(slots),
    )


def _drop_overwritten(slots: torch.Tensor) -> torch.Tensor:
    """Return the slots with -1 in place of all but the last of equal ones.

    A block that was freed may belong to another request by now.
    """
    ordered, order = slots.sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return torch.empty_like(slots).scatter_(0, order, ordered.masked_fill(~is_last, -1))
