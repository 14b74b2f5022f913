"""A drafter in two calls: bit for bit what the single operators compute."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.decoder_harness import (
    BLOCK_SIZE,
    EPS,
    EXTRAS,
    KINDS,
    NUM_BLOCKS,
    NUM_POSITIONS,
    ODD,
    Drawer,
    Shape,
    Step,
    draw_layer,
    draw_linear,
    make_caches,
    multiply,
    pack_part,
    run_singly,
)
from tests.kernels.implementations import BUILDS, native_ops, several_builds
from vllm._cpu_ops_drafter import (
    BlockDrafterWeights,
    BlockDraws,
    ContextPiece,
    ContextWeights,
    FusedBlockDrafter,
    FusedContextWriter,
    TableWeights,
)
from vllm._cpu_ops_native import NativeOps
from vllm.model_executor.layers.context_kv import join_pieces

NUM_TOKENS, NUM_COLUMNS, RANK, NUM_SLOTS = 61, 50, 32, 4
SHAPES = [
    pytest.param("float32", ODD, id="float32-odd"),
    pytest.param("int8", ODD, id="int8-odd"),
    *(pytest.param(kind, EXTRAS, id=f"{kind}-extras") for kind in KINDS),
]
each_cache = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def context_weights(ops: NativeOps, kind: str, s: Shape) -> ContextWeights:
    draw = Drawer(11)
    kv_size = s.num_kv_heads * s.head_size
    norms = draw(2, s.head_size)
    return ContextWeights(
        fc=draw_linear(ops, draw, (s.hidden,), 3 * 32, kind, False),
        hidden_norm=draw(s.hidden),
        eps=EPS,
        kv=draw_linear(ops, draw, (4 * kv_size,), s.hidden, kind, s.has_extras),
        k_norms=(norms[0], norms[1]) if s.has_extras else (None, None),
        cos_sin_cache=Drawer(7)(NUM_POSITIONS, s.head_size),
        num_kv_heads=s.num_kv_heads,
        head_size=s.head_size,
    )


def write_singly(ops, w: ContextWeights, piece: ContextPiece, caches) -> None:
    taps, positions, slots = piece.taps, piece.positions, piece.slot_mapping
    fused = ops.rms_norm(
        multiply(ops, torch.cat(taps, 1), w.fc), w.hidden_norm, EPS, None
    )
    keys, values = multiply(ops, fused, w.kv).unflatten(1, (2, 2, -1)).unbind(1)
    for layer, cache in enumerate(caches):
        heads = w.num_kv_heads, w.head_size
        k, v = (x[:, layer].unflatten(1, heads).contiguous() for x in (keys, values))
        if w.k_norms[layer] is not None:
            ops.rms_norm(k, w.k_norms[layer], EPS, k)
        nothing = torch.zeros(len(k), 1, w.head_size)
        places = positions.clamp(max=NUM_POSITIONS - 1)
        ops.rotary_embedding(places, nothing, k, w.cos_sin_cache, w.head_size)
        ops.reshape_and_cache(k, v, cache, slots)


def draw_context(num_tokens: int) -> ContextPiece:
    taps = [Drawer(seed)(num_tokens, 32) for seed in (1, 2, 3)]
    generator = torch.Generator().manual_seed(num_tokens)
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    # Not written, and behind all positions.
    positions[1::3], slots[1::3] = NUM_POSITIONS + 5, -1
    return ContextPiece(taps, positions, slots)


def cut(piece: ContextPiece, start: int, end: int) -> ContextPiece:
    part = slice(start, end)
    return ContextPiece(
        [tap[part] for tap in piece.taps],
        piece.positions[part],
        piece.slot_mapping[part],
    )


@native_ops
@each_cache
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_context_has_the_bits_of_the_single_operators(
    ops, kind, shape, num_tokens, dtype
):
    weights = context_weights(ops, kind, shape)
    caches, expected = (make_caches(shape, 2, dtype) for _ in range(2))
    context = draw_context(num_tokens)
    write_singly(ops, weights, context, expected)
    FusedContextWriter(ops, weights).run([context], caches)
    assert all(map(torch.equal, caches, expected))


@native_ops
def test_context_has_the_same_bits_in_pieces_and_with_more_threads(ops):
    writer = FusedContextWriter(ops, context_weights(ops, "Q8_0", EXTRAS))
    context = draw_context(70)
    pieces = [cut(context, *ends) for ends in [(0, 1), (1, 2), (2, 40), (40, 70)]]
    whole, at_once, one_by_one = (make_caches(EXTRAS, 2) for _ in range(3))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        writer.run([context], whole)
        torch.set_num_threads(1)
        writer.run(pieces, at_once)
        for piece in pieces:
            writer.run([piece], one_by_one)
    finally:
        torch.set_num_threads(num_threads)
    assert all(map(torch.equal, whole, at_once))
    assert all(map(torch.equal, whole, one_by_one))


@native_ops
@each_cache
@pytest.mark.parametrize("lengths", [(3, 4, 1), (1,) * 9, (20, 2, 30)])
def test_the_last_token_of_a_slot_is_written(ops, lengths, dtype):
    weights = context_weights(ops, "float32", EXTRAS)
    writer = FusedContextWriter(ops, weights)
    pieces = [draw_context(num_tokens) for num_tokens in lengths]
    generator = torch.Generator().manual_seed(5)
    for piece in pieces:
        # Few slots, so that most are written again, also within a piece.
        slots = torch.randint(-1, 6, piece.positions.shape, generator=generator)
        piece.positions[slots >= 0] %= NUM_POSITIONS
        piece.slot_mapping.copy_(slots)
    at_once, joined, one_by_one = (make_caches(EXTRAS, 2, dtype) for _ in range(3))
    writer.run(pieces, at_once)
    write_singly(ops, weights, join_pieces(pieces), joined)
    for piece in pieces:
        for place in range(len(piece.positions)):
            write_singly(ops, weights, cut(piece, place, place + 1), one_by_one)
    assert all(map(torch.equal, at_once, one_by_one))
    assert all(map(torch.equal, joined, one_by_one))


@native_ops
def test_nothing_to_write_changes_nothing(ops):
    writer = FusedContextWriter(ops, context_weights(ops, "float32", ODD))
    caches = make_caches(ODD, 2)
    before = [cache.clone() for cache in caches]
    context = draw_context(4)
    context.slot_mapping.fill_(-1)
    writer.run([context, cut(context, 0, 0)], caches)
    assert all(map(torch.equal, caches, before))


@native_ops
def test_context_outside_is_refused(ops):
    writer = FusedContextWriter(ops, context_weights(ops, "float32", ODD))
    good, bad = draw_context(3), draw_context(3)
    caches = make_caches(ODD, 2)
    before = [cache.clone() for cache in caches]
    bad.positions[2] = NUM_POSITIONS
    with pytest.raises(IndexError, match="position"):
        writer.run([good, bad], caches)
    bad.positions[2], bad.slot_mapping[2] = 0, NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(IndexError, match="slot"):
        writer.run([good, bad], caches)
    assert all(map(torch.equal, caches, before))
    taps = good.taps
    with pytest.raises(ValueError, match="5 taps"):
        writer.run([replace(good, taps=[*taps, *taps[:2]])], caches)
    with pytest.raises(ValueError, match="2 taps behind 3"):
        writer.run([good, replace(good, taps=taps[:2])], caches)
    with pytest.raises(ValueError, match=r"\(3, 48\)"):
        writer.run([replace(good, taps=taps[:2])], caches)
    with pytest.raises(ValueError, match="a cache"):
        writer.run([good], caches[:1])
    with pytest.raises(ValueError, match="float32"):
        writer.run([replace(good, taps=[tap[:2] for tap in taps])], caches)


def table_of(ops: NativeOps, rows: torch.Tensor, kind: str) -> TableWeights:
    if kind in ("float32", "mixed"):
        return TableWeights(rows, "float32", *rows.shape)
    packed = pack_part(ops, rows, kind).packed
    return TableWeights(packed, kind, *rows.shape)


def rows_of(ops: NativeOps, table: TableWeights, ids: torch.Tensor) -> torch.Tensor:
    if table.quant_type == "float32":
        return table.rows[ids]
    return ops.quantized_rows(
        table.rows, table.quant_type, table.num_rows, table.size, ids
    )


def drafter_weights(
    ops: NativeOps, kind: str, s: Shape, is_mapped: bool = True
) -> BlockDrafterWeights:
    draw = Drawer(13)
    num_tokens = NUM_TOKENS if is_mapped else NUM_COLUMNS
    confidence_size = s.hidden + (RANK if s.has_extras else 0)
    return BlockDrafterWeights(
        embedding=table_of(ops, draw(num_tokens, s.hidden), kind),
        layers=[draw_layer(ops, kind, s, seed) for seed in (1, 2)],
        norm=draw(s.hidden),
        eps=EPS,
        head=draw_linear(ops, draw, (NUM_COLUMNS,), s.hidden, kind, False),
        bigrams=table_of(ops, draw(num_tokens, RANK), kind),
        bigram_head=draw_linear(ops, draw, (NUM_COLUMNS,), RANK, kind, False),
        confidence=draw_linear(ops, draw, (1,), confidence_size, "float32", True),
        temperatures=torch.tensor([0.7, 1.3, 2.0]),
        column_ids=torch.arange(NUM_COLUMNS) + 11 if is_mapped else None,
        first_slot=1,
    )


@dataclass
class Blocks:
    """Blocks of requests over contexts of these lengths."""

    lens: tuple[int, ...]
    num_slots: int = NUM_SLOTS

    def __post_init__(self) -> None:
        num_reqs = len(self.lens)
        ends = tuple(length + self.num_slots for length in self.lens)
        self.step = Step((self.num_slots,) * num_reqs, ends, is_causal=False)
        self.input_ids = torch.full((num_reqs, self.num_slots), 2)
        self.input_ids[:, 0] = 20 + torch.arange(num_reqs)
        self.num_drafts = torch.tensor([3, 0, 2, 1] * num_reqs, dtype=torch.int32)
        self.num_drafts = self.num_drafts[:num_reqs]

    def run(self, drafter, caches, num_steps=3, at_once=100, draws=None):
        step = self.step
        return drafter.run(
            self.input_ids.flatten(),
            step.positions,
            caches,
            step.slot_mapping,
            step.block_table,
            step.query_start_loc,
            step.seq_lens_tensor,
            self.num_drafts,
            num_steps,
            at_once,
            draws,
        )


def draft_singly(ops, w: BlockDrafterWeights, blocks: Blocks, caches, draws=None):
    stream = rows_of(ops, w.embedding, blocks.input_ids.flatten())
    run_singly(ops, w.layers, blocks.step, stream, caches)
    states = ops.rms_norm(stream, w.norm, EPS, None)
    states = states.unflatten(0, (-1, blocks.num_slots))[:, 1:]
    ids, scores = [blocks.input_ids[:, 0].contiguous()], []
    for step, temperature in enumerate(w.temperatures[: states.shape[1]]):
        state = states[:, step].contiguous()
        embedding = rows_of(ops, w.bigrams, ids[-1])
        logits = multiply(ops, state, w.head) + multiply(ops, embedding, w.bigram_head)
        inputs = torch.cat((state, embedding), 1)[:, : w.confidence.size]
        scores.append(multiply(ops, inputs, w.confidence)[:, 0] / temperature)
        ids.append(choose_singly(ops, w, logits, step, draws))
    drafts = torch.stack(ids[1:], 1)
    drafts[torch.arange(drafts.shape[1]) >= blocks.num_drafts.unsqueeze(1)] = -1
    return drafts, torch.stack(scores, 1)


def choose_singly(ops, w, logits, step, draws):
    if draws is None:
        best = logits.argmax(dim=-1)
        return best if w.column_ids is None else w.column_ids[best]
    ops.apply_temperature(logits, draws.idx_mapping, draws.temperature)
    rows = draws.idx_mapping.long()
    columns = torch.arange(NUM_COLUMNS) if w.column_ids is None else w.column_ids
    draws.logits[rows.unsqueeze(1), step, columns] = logits
    kept = draws.logits[rows, step]
    return ops.gumbel_argmax(kept, draws.keys[step].contiguous(), draws.is_greedy)


def make_draws(num_reqs: int, vocab_size: int) -> BlockDraws:
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0, 0.9, 0.0])
    rows = torch.arange(num_reqs - 1, -1, -1, dtype=torch.int32)
    return BlockDraws(
        idx_mapping=rows,
        temperature=temperature,
        keys=torch.arange(3 * num_reqs).view(3, num_reqs) * 77,
        is_greedy=(temperature[rows] == 0).to(torch.uint8),
        logits=torch.full((6, 3, vocab_size), float("-inf")),
    )


@native_ops
@each_cache
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
@pytest.mark.parametrize("is_mapped", [False, True], ids=["all", "mapped"])
@pytest.mark.parametrize("lens", [(5,), (9, 1, 30, 16)], ids=str)
def test_drafts_have_the_bits_of_the_single_operators(
    ops, kind, shape, is_mapped, lens, dtype
):
    weights = drafter_weights(ops, kind, shape, is_mapped)
    blocks = Blocks(lens)
    caches, expected_caches = (make_caches(shape, 2, dtype) for _ in range(2))
    expected = draft_singly(ops, weights, blocks, expected_caches)
    drafts, scores = blocks.run(FusedBlockDrafter(ops, weights), caches)
    assert torch.equal(drafts, expected[0])
    assert torch.equal(scores, expected[1])
    assert all(map(torch.equal, caches, expected_caches))


@native_ops
@pytest.mark.parametrize("num_steps", [1, 2])
def test_blocks_of_fewer_slots_have_the_bits_of_the_single_operators(ops, num_steps):
    weights = drafter_weights(ops, "Q8_0", EXTRAS)
    drafter = FusedBlockDrafter(ops, weights)
    # One drafter runs blocks of all lengths.
    for num_slots in (NUM_SLOTS, 1 + num_steps, NUM_SLOTS):
        blocks = Blocks((9, 1, 30, 16), num_slots)
        caches, expected_caches = make_caches(EXTRAS, 2), make_caches(EXTRAS, 2)
        expected = draft_singly(ops, weights, blocks, expected_caches)
        drafts, scores = blocks.run(drafter, caches, num_steps=num_slots - 1)
        assert torch.equal(drafts, expected[0])
        assert torch.equal(scores, expected[1])
        assert all(map(torch.equal, caches, expected_caches))


@native_ops
@pytest.mark.parametrize("is_mapped", [False, True], ids=["all", "mapped"])
@pytest.mark.parametrize("kind", ["float32", "Q8_0"])
def test_draws_have_the_bits_of_the_single_operators(ops, kind, is_mapped):
    weights = drafter_weights(ops, kind, EXTRAS, is_mapped)
    blocks = Blocks((9, 1, 30, 16))
    vocab_size = NUM_TOKENS if is_mapped else NUM_COLUMNS
    draws, expected_draws = make_draws(4, vocab_size), make_draws(4, vocab_size)
    expected = draft_singly(
        ops, weights, blocks, make_caches(EXTRAS, 2), expected_draws
    )
    drafter = FusedBlockDrafter(ops, weights)
    got = blocks.run(drafter, make_caches(EXTRAS, 2), draws=draws)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(draws.logits, expected_draws.logits)


@native_ops
def test_a_request_has_the_same_drafts_alone_and_in_parts(ops):
    drafter = FusedBlockDrafter(ops, drafter_weights(ops, "Q8_0", EXTRAS))
    blocks = Blocks((9, 1, 30, 16))
    num_threads, results = torch.get_num_threads(), []
    try:
        for threads, at_once in [(1, 100), (3, 100), (2, 3), (2, 1)]:
            torch.set_num_threads(threads)
            for draws in (None, make_draws(4, NUM_TOKENS)):
                caches = make_caches(EXTRAS, 2)
                results.append(blocks.run(drafter, caches, 3, at_once, draws))
    finally:
        torch.set_num_threads(num_threads)
    for place, (drafts, scores) in enumerate(results):
        assert torch.equal(drafts, results[place % 2][0])
        assert torch.equal(scores, results[place % 2][1])
    fewer, _ = blocks.run(drafter, make_caches(EXTRAS, 2), num_steps=2)
    assert torch.equal(fewer, results[0][0][:, :2])


@several_builds
@pytest.mark.parametrize(("kind", "shape"), SHAPES)
def test_builds_agree_bit_for_bit(kind, shape):
    results, blocks = [], Blocks((9, 1))
    for ops in BUILDS:
        caches = make_caches(shape, 2)
        FusedContextWriter(ops, context_weights(ops, kind, shape)).run(
            [draw_context(40)], caches
        )
        drafter = FusedBlockDrafter(ops, drafter_weights(ops, kind, shape))
        results.append((*blocks.run(drafter, caches), *caches))
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def heads_of_zeros(ops: NativeOps) -> BlockDrafterWeights:
    """Return a drafter whose drafts are those of its table alone, the plain rows."""
    weights = drafter_weights(ops, "float32", EXTRAS, is_mapped=False)
    unit = torch.eye(NUM_COLUMNS, RANK)
    return replace(
        weights,
        head=draw_zeros(ops, EXTRAS.hidden),
        bigram_head=replace(
            weights.bigram_head, parts=(pack_part(ops, unit, "float32"),)
        ),
    )


def draw_zeros(ops: NativeOps, size: int):
    zeros = draw_linear(ops, Drawer(1), (NUM_COLUMNS,), size, "float32", False)
    part = pack_part(ops, torch.zeros(NUM_COLUMNS, size), "float32")
    return replace(zeros, parts=(part,))


@native_ops
@pytest.mark.parametrize("is_drawn", [False, True])
def test_nan_is_never_chosen_and_nothing_to_choose_gives_the_first(ops, is_drawn):
    weights = heads_of_zeros(ops)
    rows = weights.bigrams.rows
    rows[:] = 0.0
    rows[20, [3, 17]] = 1.0
    rows[3] = float("nan")
    blocks = Blocks((5,))
    draws = None
    if is_drawn:
        draws = replace(make_draws(1, NUM_COLUMNS), is_greedy=torch.ones(1).byte())
    drafts, _ = blocks.run(
        FusedBlockDrafter(ops, weights), make_caches(EXTRAS, 2), draws=draws
    )
    assert drafts[0, :2].tolist() == [3, 0]
    if draws is not None:
        # Of the row without a choice: certain of the first.
        assert draws.logits[0, 1].tolist() == [0.0] + [float("-inf")] * (
            NUM_COLUMNS - 1
        )


@native_ops
def test_blocks_outside_are_refused(ops):
    drafter = FusedBlockDrafter(ops, drafter_weights(ops, "float32", EXTRAS))
    caches = make_caches(EXTRAS, 2)
    blocks = Blocks((5, 9))
    blocks.input_ids[1, 0] = NUM_TOKENS
    with pytest.raises(IndexError, match="token"):
        blocks.run(drafter, caches)
    blocks = Blocks((5, 9))
    blocks.step.positions[3] = NUM_POSITIONS
    with pytest.raises(IndexError, match="position"):
        blocks.run(drafter, caches)
    blocks = Blocks((5, 9))
    draws = make_draws(2, NUM_TOKENS)
    draws.idx_mapping[0] = 6
    with pytest.raises(IndexError, match="token"):
        blocks.run(drafter, caches, draws=draws)
    with pytest.raises(ValueError, match="4 drafts"):
        blocks.run(drafter, caches, num_steps=4)
    with pytest.raises(ValueError, match="expected contiguous"):
        blocks.run(drafter, caches, draws=make_draws(3, NUM_TOKENS))
    for num_positions, message in [
        (NUM_SLOTS, "3 drafts"),
        (2 * NUM_SLOTS + 1, "positions of 2 blocks"),
        (3 * NUM_SLOTS, "expected contiguous"),
    ]:
        blocks = Blocks((5, 9))
        blocks.step.positions = torch.zeros(num_positions, dtype=torch.int64)
        with pytest.raises(ValueError, match=message):
            blocks.run(drafter, caches)
    blocks = Blocks((5, 9))
    with pytest.raises(ValueError, match="drafts' logits"):
        blocks.run(drafter, caches, draws=make_draws(2, NUM_COLUMNS + 10))
    weights = drafter_weights(ops, "float32", EXTRAS)
    drafter = FusedBlockDrafter(ops, replace(weights, first_slot=2))
    with pytest.raises(ValueError, match="3 drafts"):
        Blocks((5, 9)).run(drafter, caches)
    with pytest.raises(ValueError, match="as wide"):
        FusedBlockDrafter(ops, replace(weights, embedding=weights.bigrams))
