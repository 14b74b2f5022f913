"""Random decoder layers and steps, and what the single operators make of them."""

from dataclasses import dataclass, replace

import gguf
import torch

from vllm._cpu_ops_decoder import DecoderLayerWeights, LinearWeights, WeightPart
from vllm._cpu_ops_native import NativeOps
from vllm._custom_ops import cpu_kv_cache_shape

EPS = 1e-5
BLOCK_SIZE, NUM_BLOCKS, NUM_POSITIONS = 16, 12, 80
KINDS = ["float32", "Q4_0", "Q4_1", "Q8_0", "int8", "mixed"]


@dataclass(frozen=True)
class Shape:
    """Sizes that no vector divides, but for what blocks of 32 inputs ask for."""

    hidden: int = 40
    num_heads: int = 3
    num_kv_heads: int = 1
    head_size: int = 24
    inner: int = 50
    has_extras: bool = False


ODD = Shape()
GROUPED = Shape(hidden=96, num_heads=4, num_kv_heads=2, head_size=16, inner=160)
EXTRAS = replace(GROUPED, has_extras=True)


class Drawer:
    """Draws tensors one after another."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def pack_part(ops: NativeOps, weight: torch.Tensor, kind: str) -> WeightPart:
    num_columns, size = weight.shape
    if kind == "float32":
        packed = ops.pack_weight(weight)
    elif kind == "int8":
        packed = ops.pack_int8(weight)
    else:
        encoded = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        packed = ops.pack_blocks(torch.from_numpy(encoded), kind, size)
    return WeightPart(packed, kind, num_columns)


def draw_linear(
    ops: NativeOps,
    draw: Drawer,
    rows: tuple[int, ...],
    size: int,
    kind: str,
    bias: bool,
) -> LinearWeights:
    kinds = ["Q4_1", "float32", "Q8_0"] if kind == "mixed" else [kind]
    if len(kinds) == 1:
        rows = (sum(rows),)
    parts = tuple(
        pack_part(ops, draw(n, size) / size**0.5, kinds[index % len(kinds)])
        for index, n in enumerate(rows)
    )
    return LinearWeights(parts, size, draw(sum(rows)) if bias else None)


def draw_layer(ops: NativeOps, kind: str, s: Shape, seed: int) -> DecoderLayerWeights:
    draw = Drawer(seed)
    q_size, kv_size = s.num_heads * s.head_size, s.num_kv_heads * s.head_size
    return DecoderLayerWeights(
        input_norm=draw(s.hidden),
        post_norm=draw(s.hidden),
        eps=EPS,
        qkv=draw_linear(
            ops, draw, (q_size, kv_size, kv_size), s.hidden, kind, s.has_extras
        ),
        o=draw_linear(ops, draw, (s.hidden,), q_size, kind, s.has_extras),
        gate_up=draw_linear(ops, draw, (s.inner, s.inner), s.hidden, kind, False),
        down=draw_linear(ops, draw, (s.hidden,), s.inner, kind, False),
        q_norm=draw(s.head_size) if s.has_extras else None,
        k_norm=draw(s.head_size) if s.has_extras else None,
        cos_sin_cache=Drawer(7)(NUM_POSITIONS, s.head_size),
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_size=s.head_size,
        scale=s.head_size**-0.5,
    )


@dataclass
class Step:
    """Requests whose last `query_lens` tokens are run, in caches of their own."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    is_causal: bool = True

    def __post_init__(self) -> None:
        lens, ends = torch.tensor(self.query_lens), torch.tensor(self.seq_lens)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
        self.query_start_loc = starts.to(torch.int32)
        self.seq_lens_tensor = ends.to(torch.int32)
        per_req = NUM_BLOCKS // len(self.query_lens)
        count = len(self.query_lens) * per_req
        # The blocks of a request do not stand in order.
        ids = torch.arange(count - 1, -1, -1, dtype=torch.int32)
        self.block_table = ids.view(len(self.query_lens), per_req)
        self.positions = torch.cat(
            [
                torch.arange(seq_len - query_len, seq_len)
                for query_len, seq_len in zip(
                    self.query_lens, self.seq_lens, strict=True
                )
            ]
        )
        owners = torch.arange(len(self.query_lens)).repeat_interleave(lens)
        blocks = self.block_table[owners, self.positions // BLOCK_SIZE].long()
        self.slot_mapping = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE


def make_caches(
    s: Shape, num_layers: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    draw = Drawer(5)
    shape = cpu_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, s.num_kv_heads, s.head_size)
    return [draw(*shape).to(dtype) for _ in range(num_layers)]


def run_singly(ops, layers, step, stream, caches) -> None:
    for layer, cache in zip(layers, caches, strict=True):
        attended = attend(ops, layer, step, stream, cache)
        stream += multiply(ops, attended, layer.o)
        normed = ops.rms_norm(stream, layer.post_norm, EPS, None)
        gated = ops.silu_and_mul(multiply(ops, normed, layer.gate_up))
        stream += multiply(ops, gated, layer.down)


def attend(ops, layer, step, stream, cache) -> torch.Tensor:
    normed = ops.rms_norm(stream, layer.input_norm, EPS, None)
    heads = multiply(ops, normed, layer.qkv).unflatten(1, (-1, layer.head_size))
    sizes = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
    q, k, v = heads.split(sizes, dim=1)
    if layer.q_norm is not None:
        ops.rms_norm(q, layer.q_norm, EPS, q)
        ops.rms_norm(k, layer.k_norm, EPS, k)
    ops.rotary_embedding(step.positions, q, k, layer.cos_sin_cache, layer.head_size)
    ops.reshape_and_cache(k, v, cache, step.slot_mapping)
    out = torch.empty(q.shape)
    ops.paged_attention(
        q,
        cache,
        step.block_table,
        step.query_start_loc,
        step.seq_lens_tensor,
        layer.scale,
        out,
        step.is_causal,
    )
    return out.flatten(1)


def multiply(ops, x, linear: LinearWeights) -> torch.Tensor:
    products = [
        ops.packed_linear(x, part.packed, part.num_columns, None)
        if part.quant_type == "float32"
        else ops.quantized_linear(
            x, part.packed, part.quant_type, part.num_columns, None
        )
        for part in linear.parts
    ]
    product = torch.cat(products, dim=1)
    return product if linear.bias is None else product + linear.bias
