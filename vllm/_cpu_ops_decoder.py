"""Whole decoder layers in one call of the compiled CPU operators.

A step of one request spends less time in a layer than Python in ten operators, so the
layers' weights are described to the compiled side once, and a step names only what is
its own. What is computed is, bit for bit, what the single operators compute.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass
from operator import is_

import torch

from vllm._cpu_ops_checks import check_rows
from vllm._cpu_ops_native import NativeOps


@dataclass(frozen=True)
class WeightPart:
    """A packed weight.

    Args:
        packed: from `pack_weight`, `pack_blocks` or `pack_int8`, one-dimensional.
        quant_type: Q4_0, Q4_1, Q8_0, int8 or float32.
        num_columns: outputs.
    """

    packed: torch.Tensor
    quant_type: str
    num_columns: int


@dataclass(frozen=True)
class LinearWeights:
    """Packed weights whose outputs stand side by side.

    Args:
        parts: in the order of their outputs.
        size: inputs.
        bias: [outputs].
    """

    parts: tuple[WeightPart, ...]
    size: int
    bias: torch.Tensor | None


@dataclass(frozen=True)
class DecoderLayerWeights:
    """A decoder layer: pre-norm attention and gated feed-forward.

    Args:
        input_norm: [hidden_size], as post_norm.
        post_norm: of the feed-forward.
        eps: of all norms.
        qkv: queries, keys and values.
        o: of the attention's output.
        gate_up: gates and then what they scale.
        down: of the feed-forward's output.
        q_norm: [head_size], of every query head, as k_norm of keys; None without.
        k_norm: as q_norm.
        cos_sin_cache: [num_positions, rotary_dim], as `rotary_embedding` takes it.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_size: of all heads.
        scale: of the scores.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    eps: float
    qkv: LinearWeights
    o: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos_sin_cache: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float


class FusedLayers:
    """Decoder layers of one shape.

    Args:
        ops: that packed the weights.
        layers: in their order.

    Raises:
        ValueError: sizes do not belong together.
    """

    def __init__(self, ops: NativeOps, layers: Sequence[DecoderLayerWeights]) -> None:
        self._ops = ops
        # The weights live as long as their addresses are known.
        self._weights = tuple(layers)
        self._shape = layers[0]
        self._hidden_size = layers[0].qkv.size
        self._linears = LinearDescriptions(ops)
        described = [self._describe(layer) for layer in layers]
        self._layers = (_Layer * len(layers))(*described)
        shape = self._shape
        self._caches = CacheAddresses(len(layers), shape.num_kv_heads, shape.head_size)

    def run(
        self,
        stream: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        is_causal: bool,
        tap_layer_ids: Sequence[int],
        taps: torch.Tensor | None,
    ) -> None:
        """Run all layers.

        Args:
            stream: [T, hidden_size] float32, the residual stream, changed in place.
            positions: [T] int64.
            kv_caches: of all layers, of one `cpu_kv_cache_shape` and dtype.
            slot_mapping: as `reshape_and_cache` takes it.
            block_table: as `paged_attention` takes it, as the following ones.
            query_start_loc: [num_reqs + 1] int32.
            seq_lens: [num_reqs] int32.
            is_causal: False lets a query see every key of its request.
            tap_layer_ids: i is the stream that enters layer i; the number of layers is
                the stream in the end.
            taps: [len(tap_layer_ids), T, hidden_size] float32, written; None
                without taps.

        Raises:
            IndexError: a position, slot or block is outside; nothing was changed.
            ValueError: shapes do not belong together, or there is no such layer.
        """
        num_tokens = positions.shape[0]
        if stream.shape != (num_tokens, self._hidden_size):
            raise ValueError(
                f"the stream has shape {tuple(stream.shape)} for {num_tokens} tokens "
                f"of {self._hidden_size}"
            )
        step = self.describe_step(
            positions,
            kv_caches,
            slot_mapping,
            block_table,
            query_start_loc,
            seq_lens,
            is_causal,
        )
        if taps is not None:
            self._add_taps(step, tap_layer_ids, taps)
        outside = self._ops.decoder_layers(
            self.address,
            len(self._layers),
            addressof(step),
            _rows_address(stream, torch.float32),
            stream.stride()[0],
            self.cache_addresses,
        )
        raise_if_outside(outside)

    @property
    def address(self) -> int:
        """Where the described layers are."""
        return addressof(self._layers)

    @property
    def cache_addresses(self) -> int:
        """Where the addresses of the caches are that the last step was described on."""
        return self._caches.address

    def describe_step(
        self,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        is_causal: bool,
    ) -> "Step":
        """Return a step without taps; arguments and errors as those of `run`."""
        num_tokens, num_reqs = positions.shape[0], seq_lens.shape[0]
        if block_table.shape[0] < num_reqs:
            raise ValueError("each request needs its blocks")
        self._caches.bind(kv_caches)
        num_blocks, _, _, block_size, _ = kv_caches[0].shape
        return Step(
            address_of(positions, (num_tokens,), torch.int64),
            address_of(slot_mapping, (num_tokens,), torch.int64),
            _rows_address(block_table, torch.int32),
            block_table.stride()[0],
            block_table.shape[1],
            address_of(query_start_loc, (num_reqs + 1,), torch.int32),
            address_of(seq_lens, (num_reqs,), torch.int32),
            num_tokens,
            num_reqs,
            num_blocks,
            block_size,
            is_causal,
            kv_caches[0].dtype is torch.float16,
        )

    def _add_taps(
        self, step: "Step", tap_layer_ids: Sequence[int], taps: torch.Tensor
    ) -> None:
        if not all(0 <= tap <= len(self._layers) for tap in tap_layer_ids):
            raise ValueError(f"there are no layers to tap at {tap_layer_ids}")
        num_taps = len(tap_layer_ids)
        step.taps = address_of(taps, (num_taps, step.num_tokens, self._hidden_size))
        step.tap_layer_ids = (c_int64 * num_taps)(*tap_layer_ids)
        step.num_taps = num_taps

    def _describe(self, layer: DecoderLayerWeights) -> "_Layer":
        hidden_size = self._hidden_size
        num_positions, rotary_dim = layer.cos_sin_cache.shape
        q_size = layer.num_heads * layer.head_size
        kv_size = layer.num_kv_heads * layer.head_size
        inner = layer.down.size
        shape = self._shape
        if (
            rotary_dim > layer.head_size
            or layer.num_heads % layer.num_kv_heads
            or (layer.num_heads, layer.num_kv_heads, layer.head_size)
            != (shape.num_heads, shape.num_kv_heads, shape.head_size)
            or (inner, num_positions) != (shape.down.size, shape.cos_sin_cache.shape[0])
        ):
            raise ValueError("the layers are not of one shape")
        head = (layer.head_size,)
        return _Layer(
            self._linear(layer.qkv, hidden_size, q_size + 2 * kv_size),
            self._linear(layer.o, q_size, hidden_size),
            self._linear(layer.gate_up, hidden_size, 2 * inner),
            self._linear(layer.down, inner, hidden_size),
            address_of(layer.input_norm, (hidden_size,)),
            address_of(layer.post_norm, (hidden_size,)),
            None if layer.q_norm is None else address_of(layer.q_norm, head),
            None if layer.k_norm is None else address_of(layer.k_norm, head),
            address_of(layer.cos_sin_cache, (num_positions, rotary_dim)),
            num_positions,
            rotary_dim,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            layer.eps,
            layer.scale,
        )

    def _linear(self, linear: LinearWeights, size: int, num_columns: int) -> "Linear":
        return self._linears.describe(linear, size, num_columns)


class CacheAddresses:
    """Where the caches of some layers are: the same places in every step.

    Args:
        num_layers: of one shape.
        num_kv_heads: key and value heads.
        head_size: of all heads.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_size: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._width = -(-head_size // 16) * 16
        self._kv_caches: list[torch.Tensor | None] = [None] * num_layers
        self._addresses = (c_void_p * num_layers)()
        self.address = addressof(self._addresses)

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Know the addresses of these caches.

        Raises:
            ValueError: they are not of one `cpu_kv_cache_shape` and dtype.
        """
        is_known = len(kv_caches) == len(self._kv_caches)
        if is_known and all(map(is_, kv_caches, self._kv_caches)):
            return
        num_blocks, _, _, block_size, _ = kv_caches[0].shape
        expected = (num_blocks, 2, self._num_kv_heads, block_size, self._width)
        if len(kv_caches) != len(self._addresses) or block_size % 16:
            raise ValueError("each layer needs a cache of whole blocks of 16 tokens")
        is_half = kv_caches[0].dtype is torch.float16
        dtype = torch.float16 if is_half else torch.float32
        # All are looked at before one is taken over.
        addresses = [address_of(cache, expected, dtype) for cache in kv_caches]
        for layer, address in enumerate(addresses):
            self._addresses[layer] = address
        self._kv_caches = list(kv_caches)


class LinearDescriptions:
    """Describes packed weights, and keeps what the descriptions point to.

    Args:
        ops: that packed the weights.
    """

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        self._kept: list[tuple[LinearWeights, ctypes.Array[_Weight]]] = []

    def describe(self, linear: LinearWeights, size: int, num_columns: int) -> "Linear":
        """Return a weight of these sizes.

        Raises:
            ValueError: it has others.
        """
        columns = [part.num_columns for part in linear.parts]
        if linear.size != size or sum(columns) != num_columns:
            raise ValueError(
                f"the weight has {sum(columns)} columns of {linear.size}, not "
                f"{num_columns} of {size}"
            )
        bias = None
        if linear.bias is not None:
            bias = address_of(linear.bias, (num_columns,))
        parts = []
        for part in linear.parts:
            weight_format = self._ops.check_packed(
                part.packed, part.quant_type, part.num_columns, size
            )
            address = part.packed.data_ptr()
            parts.append(_Weight(weight_format, address, bias, part.num_columns))
            if bias is not None:
                bias += part.num_columns * 4
        array = (_Weight * len(parts))(*parts)
        self._kept.append((linear, array))
        return Linear(array, len(parts), size)


def raise_if_outside(code: int) -> None:
    """Raise what an operation on the paged cache has found, before it changed it."""
    if code:
        what = ("position", "slot", "block", "token")[code - 1]
        raise IndexError(f"a {what} of the step is outside")


def address_of(
    x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> int:
    """Return where x lies, which must be contiguous values of the shape."""
    if x.shape != shape or x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(
            f"expected contiguous {dtype} {shape}, got {x.dtype} {tuple(x.shape)}"
        )
    return x.data_ptr()


def _rows_address(x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return where x [N, D] lies, whose rows must be contiguous."""
    check_rows(x, dtype)
    return x.data_ptr()


# The structures of csrc/cpu/api.h, field by field.
class _Weight(Structure):
    _fields_ = (
        ("format", c_int64),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_columns", c_int64),
    )


class Linear(Structure):
    _fields_ = (
        ("parts", POINTER(_Weight)),
        ("num_parts", c_int64),
        ("size", c_int64),
    )


class _Layer(Structure):
    _fields_ = (
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin_cache", c_void_p),
        ("num_positions", c_int64),
        ("rotary_dim", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class Step(Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("max_blocks", c_int64),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("num_tokens", c_int64),
        ("num_reqs", c_int64),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("is_causal", c_int64),
        ("is_half", c_int64),
        ("taps", c_void_p),
        ("tap_layer_ids", POINTER(c_int64)),
        ("num_taps", c_int64),
    )
