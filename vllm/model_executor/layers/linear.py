"""A linear layer that holds one or several of the checkpoint's weights."""

import torch
from torch import nn

from vllm import _custom_ops as ops
from vllm.model_executor.layers.layer import Layer, empty_weight

_NUM_UNITS_AT_ONCE = 64


class Linear(Layer):
    """y = x W^T + b, with the weights of several checkpoint layers stacked in W.

    Args:
        in_features: width of x.
        shards: checkpoint name -> its output features, in the order in which they are
            stacked; one entry for a layer that stands alone.
        bias: every shard has a bias.
        dtype: of weight, bias and x.
        tied_weight: [out_features, in_features], owned by somebody else and used in
            place of an own weight, which then has no slot.
    """

    def __init__(
        self,
        in_features: int,
        shards: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = shards
        self.out_features = sum(shards.values())
        self.is_tied = tied_weight is not None
        if tied_weight is None:
            tied_weight = empty_weight(self.out_features, in_features, dtype=dtype)
        self.weight = tied_weight
        self.bias = empty_weight(self.out_features, dtype=dtype) if bias else None

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        slots: dict[str, torch.Tensor] = {}
        if not self.is_tied:
            slots |= self._slices(self.weight, "weight")
        if self.bias is not None:
            slots |= self._slices(self.bias, "bias")
        return slots

    def process_weights_after_loading(self) -> None:
        """Lay the weight out for the device; the slots are gone afterwards."""
        packed = ops.pack_weight(self.weight.data)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [M, out_features] of x [M, in_features]."""
        return ops.packed_linear(x, self.weight, self.out_features, self.bias)

    def unpack(self) -> torch.Tensor:
        """Return the weight [out_features, in_features], whatever its layout."""
        # The product of a unit vector is a column.
        units = torch.eye(
            self.in_features, dtype=self.weight.dtype, device=self.weight.device
        )
        columns = [
            ops.packed_linear(part, self.weight, self.out_features)
            for part in units.split(_NUM_UNITS_AT_ONCE)
        ]
        return torch.cat(columns).T.contiguous()

    def _slices(self, stacked: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
        pieces = stacked.data.split(list(self.shards.values()))
        return {
            f"{name}.{kind}": piece
            for name, piece in zip(self.shards, pieces, strict=True)
        }
