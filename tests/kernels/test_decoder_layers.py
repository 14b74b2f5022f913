"""Fused decoder layers: bit for bit what the single operators compute."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.decoder_harness import (
    BLOCK_SIZE,
    EXTRAS,
    GROUPED,
    KINDS,
    NUM_BLOCKS,
    NUM_POSITIONS,
    ODD,
    Drawer,
    Step,
    draw_layer,
    make_caches,
    run_singly,
)
from tests.kernels.implementations import BUILDS, native_ops, several_builds
from vllm._cpu_ops_decoder import (
    FusedLayers,
    LinearWeights,
    WeightPart,
)

SHAPES = [
    pytest.param("float32", ODD, id="float32-odd"),
    pytest.param("int8", ODD, id="int8-odd"),
    *(pytest.param(kind, EXTRAS, id=f"{kind}-extras") for kind in KINDS),
]


each_cache = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


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
