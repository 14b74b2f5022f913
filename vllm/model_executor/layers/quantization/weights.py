"""Weights as the device reads them: what a product, a look-up and a reader need."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm import _custom_ops as ops
from vllm._cpu_ops_decoder import WeightPart
from vllm._cpu_ops_torch import LinearStatistics

# Rows of the unit matrix at once, which bounds the products that they give.
_NUM_UNITS_AT_ONCE = 64
# Rows that are rounded at once, which bounds what that needs in between.
_NUM_ROWS_AT_ONCE = 4096
# Values of a block. Steps of Q8_0 are -127..127 from zero, of Q4_1 0..15 upwards.
_BLOCK = 32
_MAX_STEP = 127
_MAX_NIBBLE = 15
_MAX_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Blocks:
    """Rows of a weight, encoded as in a GGUF file.

    Args:
        quant_type: Q4_0, Q4_1 or Q8_0.
        rows: [N, bytes of a row] uint8.
        size: values of a row.
    """

    quant_type: str
    rows: torch.Tensor
    size: int

    @classmethod
    def from_float(cls, weight: torch.Tensor, quant_type: str = "Q8_0") -> "Blocks":
        """Return a weight [N, size] rounded; size a multiple of 32.

        A number is off by half a step at most: in Q8_0 1/254 of the largest of its
        block, in Q4_1 1/30 of the block's range; and by what scale and minimum lose in
        half precision.

        Args:
            quant_type: Q8_0 or Q4_1.
        """
        encode = {"Q8_0": _encode_q8_0, "Q4_1": _encode_q4_1}[quant_type]
        rows = [encode(part) for part in weight.split(_NUM_ROWS_AT_ONCE)]
        return cls(quant_type, torch.cat(rows), weight.shape[1])


class PackedWeight(ABC):
    """A weight [num_rows, size] in the layout of one kind of product."""

    num_rows: int

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [M, num_rows], x [M, size] times the transposed weight, plus bias."""

    def maybe_argmax(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return [M] int64, the argmax of each row of `multiply`, which is not written.

        None where the product has to be.
        """
        part = self._maybe_one_part()
        if part is None:
            return None
        return ops.linear_argmax(
            x, part.packed, part.quant_type, part.num_columns, bias
        )

    def maybe_statistics(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics | None:
        """Return `linear_statistics` of `multiply`; None where all has to be written.

        Args:
            listed_rows: [n] int64, increasing; of which the largest are wanted.
            count: of these.
            written_rows: [m] int64, increasing; of which all are wanted.
        """
        part = self._maybe_one_part()
        if part is None:
            return None
        return ops.linear_statistics(
            x,
            part.packed,
            part.quant_type,
            part.num_columns,
            bias,
            listed_rows,
            count,
            written_rows,
        )

    def _maybe_one_part(self) -> WeightPart | None:
        parts = self.compiled_parts()
        return parts[0] if parts is not None and len(parts) == 1 else None

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, size], the rows of ids [n] int64."""

    @abstractmethod
    def compiled_parts(self) -> tuple[WeightPart, ...] | None:
        """Return what the compiled operators read; None if others do."""

    def select(self, ids: torch.Tensor) -> "PackedWeight":
        """Return a weight of the rows of ids [n] int64 alone, none of them changed."""
        return DenseWeight(self.rows(ids))

    def unpack(self) -> torch.Tensor:
        """Return [num_rows, size]."""
        return self.rows(torch.arange(self.num_rows))


class DenseWeight(PackedWeight):
    """Numbers in the dtype of the activations.

    Args:
        weight: [num_rows, size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_rows, self.size = weight.shape
        self._packed = ops.pack_weight(weight)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [M, num_rows]."""
        return ops.packed_linear(x, self._packed, self.num_rows, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, size], exactly."""
        packed = self._packed
        if packed.dim() == 2:
            return packed[ids.to(packed.device)]
        # The product of a unit vector is a column.
        units = torch.eye(self.size, dtype=packed.dtype, device=packed.device)
        columns = [
            self.multiply(part, None)[:, ids]
            for part in units.split(_NUM_UNITS_AT_ONCE)
        ]
        return torch.cat(columns).T.contiguous()

    def compiled_parts(self) -> tuple[WeightPart, ...] | None:
        """Return one part."""
        return _one_part(self._packed, "float32", self.num_rows)


class QuantizedWeight(PackedWeight):
    """Integers with scales, multiplied as integers.

    Args:
        packed: from `pack_blocks` or `pack_int8`.
        quant_type: of it.
    """

    def __init__(
        self, packed: torch.Tensor, quant_type: str, num_rows: int, size: int
    ) -> None:
        self.num_rows, self.size = num_rows, size
        self._packed = packed
        self.quant_type = quant_type

    @classmethod
    def from_blocks(cls, blocks: Blocks) -> "QuantizedWeight":
        """Return the blocks of a file, no bit of them changed."""
        packed = ops.pack_blocks(blocks.rows, blocks.quant_type, blocks.size)
        return cls(packed, blocks.quant_type, blocks.rows.shape[0], blocks.size)

    @classmethod
    def from_float(cls, weight: torch.Tensor) -> "QuantizedWeight":
        """Return a weight [num_rows, size] rounded to int8, one scale a row."""
        return cls(ops.pack_int8(weight), "int8", *weight.shape)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [M, num_rows]; x is rounded to int8."""
        return ops.quantized_linear(
            x, self._packed, self.quant_type, self.num_rows, bias
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, size] float32."""
        return ops.quantized_rows(
            self._packed, self.quant_type, self.num_rows, self.size, ids
        )

    def compiled_parts(self) -> tuple[WeightPart, ...] | None:
        """Return one part."""
        return _one_part(self._packed, self.quant_type, self.num_rows)

    def select(self, ids: torch.Tensor) -> "QuantizedWeight":
        """Return a weight of the same kind."""
        packed = ops.quantized_select(
            self._packed, self.quant_type, self.num_rows, self.size, ids
        )
        return QuantizedWeight(packed, self.quant_type, len(ids), self.size)


class StackedWeight(PackedWeight):
    """Weights of different kinds, one above the other.

    Args:
        parts: of the same size.
    """

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        self._parts = tuple(parts)
        self._num_rows = [part.num_rows for part in parts]
        self.num_rows = sum(self._num_rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [M, num_rows]."""
        products = torch.cat([part.multiply(x, None) for part in self._parts], dim=1)
        return products if bias is None else products.add_(bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, size]."""
        return self.unpack()[ids]

    def compiled_parts(self) -> tuple[WeightPart, ...] | None:
        """Return the parts' parts."""
        parts = [part.compiled_parts() for part in self._parts]
        if any(part is None for part in parts):
            return None
        return tuple(inner for part in parts for inner in part or ())

    def unpack(self) -> torch.Tensor:
        """Return [num_rows, size]."""
        return torch.cat([part.unpack() for part in self._parts])


def _one_part(
    packed: torch.Tensor, quant_type: str, num_rows: int
) -> tuple[WeightPart, ...] | None:
    # The twins' layouts are two-dimensional.
    is_compiled = packed.dim() == 1
    return (WeightPart(packed, quant_type, num_rows),) if is_compiled else None


def stack_blocks(shards: Sequence[Blocks]) -> PackedWeight:
    """Return blocks one above the other, in as few products as their types allow."""
    merged: list[Blocks] = []
    for shard in shards:
        if merged and merged[-1].quant_type == shard.quant_type:
            rows = torch.cat((merged[-1].rows, shard.rows))
            merged[-1] = Blocks(shard.quant_type, rows, shard.size)
        else:
            merged.append(shard)
    parts = [QuantizedWeight.from_blocks(blocks) for blocks in merged]
    return parts[0] if len(parts) == 1 else StackedWeight(parts)


def round_to_blocks(weight: torch.Tensor, quant_type: str = "Q8_0") -> PackedWeight:
    """Return a weight [num_rows, size] in blocks; as numbers if none fill a row.

    Args:
        quant_type: as in `Blocks.from_float`.
    """
    if weight.shape[1] % _BLOCK:
        return DenseWeight(weight)
    return QuantizedWeight.from_blocks(Blocks.from_float(weight, quant_type))


def narrow(weight: PackedWeight) -> PackedWeight:
    """Return a weight of eight bits in Q4_1, another one as it is."""
    if isinstance(weight, QuantizedWeight) and weight.quant_type in ("Q8_0", "int8"):
        return round_to_blocks(weight.unpack(), "Q4_1")
    return weight


def _encode_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return [N, bytes of a row]: of each block its scale and the steps to its values.

    Steps are counted in the scale as it is stored, which is rounded itself.
    """
    values = weight.float().unflatten(1, (-1, _BLOCK))
    scales = (values.abs().amax(-1, keepdim=True) / _MAX_STEP).half()
    wide = scales.float()
    steps = (values / wide.masked_fill(wide == 0, 1.0)).round()
    steps = steps.clamp(-_MAX_STEP, _MAX_STEP).to(torch.int8)
    encoded = (scales.view(torch.uint8), steps.view(torch.uint8))
    return torch.cat(encoded, dim=-1).flatten(1)


def _encode_q4_1(weight: torch.Tensor) -> torch.Tensor:
    """Return [N, bytes of a row]: of each block scale, minimum and steps in nibbles."""
    values = weight.float().unflatten(1, (-1, _BLOCK))
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    scale = ((high - low) / _MAX_NIBBLE).clamp(max=_MAX_HALF).half()
    minimum = low.clamp(-_MAX_HALF, _MAX_HALF).half()
    # Steps are from what is stored.
    step = scale.float()
    steps = (values - minimum.float()) / step.masked_fill(step == 0, 1.0)
    steps = steps.round_().clamp_(0, _MAX_NIBBLE).to(torch.uint8)
    # A byte has value i in its low half, and value i + 16 in its high.
    first, second = steps.chunk(2, dim=-1)
    encoded = (scale.view(torch.uint8), minimum.view(torch.uint8), first | second << 4)
    return torch.cat(encoded, dim=-1).flatten(1)
