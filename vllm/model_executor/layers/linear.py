"""A linear layer that holds one or several of the checkpoint's weights."""

import torch
from torch import nn

from vllm._cpu_ops_decoder import LinearWeights
from vllm._cpu_ops_torch import LinearStatistics
from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.model_executor.layers.layer import Layer, empty_weight
from vllm.model_executor.layers.quantization.methods import (
    UNQUANTIZED,
    QuantizationMethod,
)
from vllm.model_executor.layers.quantization.weights import (
    Blocks,
    PackedWeight,
    StackedWeight,
    stack_blocks,
)


class Linear(Layer):
    """y = x W^T + b, with the weights of several checkpoint layers stacked in W.

    Args:
        in_features: width of x.
        shards: checkpoint name -> its output features, in the order in which they are
            stacked; one entry for a layer that stands alone.
        bias: every shard has a bias.
        dtype: of weight, bias and x.
        tied_embedding: whose table is the weight, which then has no slot.
    """

    def __init__(
        self,
        in_features: int,
        shards: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        tied_embedding: VocabEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = shards
        self.dtype = dtype
        self.out_features = sum(shards.values())
        self.is_tied = tied_embedding is not None
        # A tuple, so that the table is not registered a second time.
        self._tied: tuple[VocabEmbedding, ...] = (
            () if tied_embedding is None else (tied_embedding,)
        )
        # Until the weights are laid out.
        self.weight: nn.Parameter | None = None
        if not self.is_tied:
            self.weight = empty_weight(self.out_features, in_features, dtype=dtype)
        self.bias = empty_weight(self.out_features, dtype=dtype) if bias else None
        self._blocks: dict[str, Blocks] = {}
        self._packed: PackedWeight | None = None

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        slots: dict[str, torch.Tensor] = {}
        if self.weight is not None:
            slots |= self._slices(self.weight, "weight")
        if self.bias is not None:
            slots |= self._slices(self.bias, "bias")
        return slots

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """Take a weight as blocks, in place of what goes to its slot.

        Args:
            name: of the weight's slot.
            blocks: of its shape.

        Returns:
            False where there is no such weight.
        """
        shard = name.removesuffix(".weight")
        if shard == name or shard not in self.shards or self.weight is None:
            return False
        self._blocks[shard] = blocks
        return True

    def process_weights_after_loading(
        self, method: QuantizationMethod = UNQUANTIZED
    ) -> None:
        """Lay the weight out for the device; the slots are gone afterwards."""
        if self.is_tied:
            self._packed = self._tied[0].as_head(method)
            return
        self._packed = self._pack(method)
        self.weight = None
        self._blocks = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [M, out_features] of x [M, in_features]."""
        assert self._packed is not None, "weights are laid out"
        return self._packed.multiply(x, self.bias)

    def maybe_argmax(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return [M] int64, the largest output of each row; None: see the weight's."""
        return self.packed.maybe_argmax(x, self.bias)

    def maybe_statistics(
        self,
        x: torch.Tensor,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics | None:
        """Return what is known of the outputs without them; None: see the weight's."""
        return self.packed.maybe_statistics(
            x, self.bias, listed_rows, count, written_rows
        )

    @property
    def packed(self) -> PackedWeight:
        """The weight, laid out."""
        assert self._packed is not None, "weights are laid out"
        return self._packed

    def select(
        self, ids: torch.Tensor, method: QuantizationMethod = UNQUANTIZED
    ) -> "Linear":
        """Return a layer of its own with the outputs of ids [n] int64.

        This layer has one weight and no bias.

        Args:
            method: may narrow the rows; else they are as they are.
        """
        assert self.bias is None, "a bias would be left out"
        [name] = self.shards
        layer = Linear(self.in_features, {name: len(ids)}, bias=False, dtype=self.dtype)
        layer.weight = None
        packed = self.packed.select(ids)
        layer._packed = packed if method.repack is None else method.repack(packed)
        return layer

    def unpack(self) -> torch.Tensor:
        """Return the weight [out_features, in_features], whatever its layout."""
        return self.packed.unpack()

    def compiled_weights(self) -> LinearWeights | None:
        """Return the weights as the compiled operators read them; None if others do."""
        assert self._packed is not None, "weights are laid out"
        parts = self._packed.compiled_parts()
        if parts is None:
            return None
        return LinearWeights(parts, self.in_features, self.bias)

    def _pack(self, method: QuantizationMethod) -> PackedWeight:
        assert self.weight is not None, "weights are laid out once"
        if not self._blocks:
            return method.pack(self.weight.data)
        if self._blocks.keys() == self.shards.keys():
            return stack_blocks([self._blocks[name] for name in self.shards])
        pieces = self.weight.data.split(list(self.shards.values()))
        return StackedWeight(
            [
                stack_blocks([self._blocks[name]])
                if name in self._blocks
                else method.pack(piece)
                for name, piece in zip(self.shards, pieces, strict=True)
            ]
        )

    def _slices(self, stacked: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
        pieces = stacked.data.split(list(self.shards.values()))
        return {
            f"{name}.{kind}": piece
            for name, piece in zip(self.shards, pieces, strict=True)
        }
