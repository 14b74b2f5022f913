"""Fused decoder layers: bit for bit what the single operators compute."""

from dataclasses import dataclass, replace

import gguf
import pytest
import torch

from tests.kernels.implementations import BUILDS, native_ops, several_builds
from vllm._cpu_ops_decoder import (
    DecoderLayerWeights,
    FusedLayers,
    LinearWeights,
    WeightPart,
)
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
SHAPES = [
    pytest.param("float32", ODD, id="float32-odd"),
    pytest.param("int8", ODD, id="int8-odd"),
    *(pytest.param(kind, EXTRAS, id=f"{kind}-extras") for kind in KINDS),
]


each_cache = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


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


def run_fused(ops, layers, step, stream, caches, tap_layer_ids=()) -> torch.Tensor:
    taps = torch.empty(len(tap_layer_ids), *stream.shape)
    FusedLayers(ops, layers).run(
        stream,
        step.positions,
        caches,
        step.slot_mapping,
        step.block_table,
        step.query_start_loc,
        step.seq_lens_tensor,
        step.is_causal,
        tap_layer_ids,
        taps,
    )
    return taps


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


@native_ops
@each_cache
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize(
    "step",
    [
        Step((1,), (1,)),
        Step((1, 5, 13), (40, 5, 21)),
        Step((4, 4), (20, 33), is_causal=False),
    ],
    ids=["one", "mixed", "not_causal"],
)
def test_fused_layers_give_the_bits_of_the_single_operators(
    ops, kind, shape, step, dtype
):
    layers = [draw_layer(ops, kind, shape, seed) for seed in (1, 2)]
    stream = Drawer(3)(len(step.positions), shape.hidden)
    caches, expected_caches = (make_caches(shape, 2, dtype) for _ in range(2))
    expected = stream.clone()
    run_singly(ops, layers, step, expected, expected_caches)
    run_fused(ops, layers, step, stream, caches)
    assert torch.equal(stream, expected)
    assert stream.isfinite().all()
    assert all(map(torch.equal, caches, expected_caches))


@native_ops
@each_cache
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_chunks(ops, kind, dtype):
    layers = [draw_layer(ops, kind, EXTRAS, seed) for seed in (1, 2)]
    stream = Drawer(3)(60, EXTRAS.hidden)
    whole, parts = stream.clone(), []
    run_fused(ops, layers, Step((60,), (60,)), whole, make_caches(EXTRAS, 2, dtype))
    caches, start = make_caches(EXTRAS, 2, dtype), 0
    for end in (1, 14, 47, 48, 60):
        part = stream[start:end].clone()
        run_fused(ops, layers, Step((end - start,), (end,)), part, caches)
        parts.append(part)
        start = end
    assert torch.equal(torch.cat(parts), whole)


@native_ops
def test_the_number_of_threads_changes_no_bit(ops):
    layers = [draw_layer(ops, "Q4_1", EXTRAS, 1)]
    step = Step((30, 1), (60, 50))
    results, num_threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            stream = Drawer(3)(31, EXTRAS.hidden)
            run_fused(ops, layers, step, stream, make_caches(EXTRAS, 1))
            results.append(stream)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*results)


@several_builds
@each_cache
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
def test_builds_agree_bit_for_bit(kind, shape, dtype):
    step, results = Step((1, 9), (33, 9)), []
    for ops in BUILDS:
        stream = Drawer(3)(10, shape.hidden)
        layers = [draw_layer(ops, kind, shape, seed) for seed in (1, 2)]
        run_fused(ops, layers, step, stream, make_caches(shape, 2, dtype))
        results.append(stream)
    assert all(torch.equal(results[0], other) for other in results[1:])


@native_ops
@pytest.mark.parametrize("tap_layer_ids", [(0,), (3, 0, 2), (2, 3), (1, 0, 3, 2)])
def test_taps_are_the_stream_on_its_way(ops, tap_layer_ids):
    layers = [draw_layer(ops, "float32", ODD, seed) for seed in (1, 2, 3)]
    step, caches = Step((2, 40), (20, 40)), make_caches(ODD, 3)
    # Rows of a wider tensor.
    stream = Drawer(3)(42, ODD.hidden + 5)[:, 5:]
    on_its_way = [stream.clone()]
    for layer, cache in zip(layers, make_caches(ODD, 3), strict=True):
        on_its_way.append(on_its_way[-1].clone())
        run_singly(ops, [layer], step, on_its_way[-1], [cache])
    taps = run_fused(ops, layers, step, stream, caches, tap_layer_ids)
    assert torch.equal(taps, torch.stack([on_its_way[i] for i in tap_layer_ids]))
    assert torch.equal(stream, on_its_way[-1])


@native_ops
def test_rows_of_a_wider_tensor_are_changed_where_they_lie(ops):
    layers, step = [draw_layer(ops, "int8", ODD, 1)], Step((3,), (3,))
    wide = Drawer(3)(3, ODD.hidden + 5)
    before, expected = wide.clone(), wide[:, 5:].clone()
    run_fused(ops, layers, step, expected, make_caches(ODD, 1))
    run_fused(ops, layers, step, wide[:, 5:], make_caches(ODD, 1))
    assert torch.equal(wide[:, 5:], expected)
    assert torch.equal(wide[:, :5], before[:, :5])


@native_ops
def test_caches_that_moved_are_found(ops):
    fused = FusedLayers(ops, [draw_layer(ops, "float32", ODD, 1)])
    step, results = Step((2,), (20,)), []
    for caches in (make_caches(ODD, 1), make_caches(ODD, 1)):
        stream = Drawer(3)(2, ODD.hidden)
        fused.run(
            stream,
            step.positions,
            caches,
            step.slot_mapping,
            step.block_table,
            step.query_start_loc,
            step.seq_lens_tensor,
            True,
            (),
            torch.empty(0, *stream.shape),
        )
        results.append(caches[0])
    assert torch.equal(*results)


@native_ops
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", torch.tensor([0, NUM_POSITIONS])),
        ("position", torch.tensor([-1, 0])),
        ("slot", torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE])),
        ("block", torch.tensor([[NUM_BLOCKS]], dtype=torch.int32)),
        ("block", torch.tensor([[-1]], dtype=torch.int32)),
    ],
)
def test_an_index_outside_is_an_error_and_changes_nothing(ops, name, value):
    step = Step((2,), (2,))
    field = {"position": "positions", "slot": "slot_mapping", "block": "block_table"}
    setattr(step, field[name], value)
    stream, caches = Drawer(3)(2, ODD.hidden), make_caches(ODD, 1)
    before = stream.clone()
    with pytest.raises(IndexError, match=name):
        run_fused(ops, [draw_layer(ops, "float32", ODD, 1)], step, stream, caches)
    assert torch.equal(stream, before)
    assert torch.equal(caches[0], make_caches(ODD, 1)[0])


@native_ops
def test_refuses_shapes_that_do_not_belong_together(ops):
    layer, step = draw_layer(ops, "float32", ODD, 1), Step((2,), (2,))
    other = draw_layer(ops, "float32", GROUPED, 1)
    stream, caches = Drawer(3)(2, ODD.hidden), make_caches(ODD, 1)
    part = WeightPart(torch.zeros(16), "float32", ODD.hidden)
    short = LinearWeights((part,), ODD.inner, None)
    with pytest.raises(ValueError, match="not of one shape"):
        FusedLayers(ops, [layer, other])
    with pytest.raises(ValueError, match="columns of 50"):
        FusedLayers(ops, [replace(layer, o=layer.down)])
    with pytest.raises(ValueError, match="elements"):
        FusedLayers(ops, [replace(layer, down=short)])
    with pytest.raises(ValueError, match="contiguous"):
        FusedLayers(ops, [replace(layer, q_norm=torch.zeros(23))])
    with pytest.raises(ValueError, match="stream"):
        run_fused(ops, [layer], step, stream[:1], caches)
    with pytest.raises(ValueError, match="rows"):
        run_fused(ops, [layer], step, stream.T.contiguous().T, caches)
    with pytest.raises(ValueError, match="contiguous"):
        run_fused(ops, [layer], step, stream, [caches[0][:, :, :, :, :8]])
    with pytest.raises(ValueError, match="float16"):
        run_fused(
            ops, [layer] * 2, step, stream, [*make_caches(ODD, 1, torch.half), *caches]
        )
    with pytest.raises(ValueError, match="each layer"):
        run_fused(ops, [layer, layer], step, stream, caches)
    for tap_layer_id in (-1, 2):
        with pytest.raises(ValueError, match="no layers to tap"):
            run_fused(ops, [layer], step, stream, caches, (tap_layer_id,))
