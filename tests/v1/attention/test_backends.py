"""Every attention backend against dense attention over the same keys."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.markers import needs_cpu_ops
from vllm._custom_ops import has_cpu_ops
from vllm.exceptions import UnsupportedError
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.torch_sdpa import TorchSDPABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.selector import get_attn_backend

BLOCK_SIZE = 16
BACKENDS = [
    pytest.param(CPUAttentionBackend, marks=needs_cpu_ops),
    TorchSDPABackend,
    TritonAttentionBackend,
]


each_cache = pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])


@dataclass
class Batch:
    """Requests of random keys, and the dense answer of their last query tokens."""

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query_lens: list[int]
    scale: float

    def expected(self, is_causal: bool) -> torch.Tensor:
        rows = []
        queries = self.query.double().split(self.query_lens)
        for query, key, value in zip(queries, self.keys, self.values, strict=True):
            seq_len, query_len = key.shape[0], query.shape[0]
            group = query.shape[1] // key.shape[1]
            for token in range(query_len):
                seen = seq_len - query_len + token + 1 if is_causal else seq_len
                for head in range(query.shape[1]):
                    k = key[:seen, head // group].double()
                    v = value[:seen, head // group].double()
                    rows.append((k @ query[token, head] * self.scale).softmax(0) @ v)
        return torch.stack(rows).view(self.query.shape)


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_size: int = 64,
) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Batch(
        query=draw(sum(query_lens), num_heads, head_size),
        keys=[draw(n, num_kv_heads, head_size) for n in seq_lens],
        values=[draw(n, num_kv_heads, head_size) for n in seq_lens],
        query_lens=query_lens,
        scale=head_size**-0.5,
    )


def run(
    backend: type[AttentionBackend],
    batch: Batch,
    is_causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Write the cache, whose other slots hold NaN, and attend."""
    seq_lens = [len(key) for key in batch.keys]
    num_blocks = 1 + sum(-(-n // BLOCK_SIZE) for n in seq_lens)
    _, num_kv_heads, head_size = batch.keys[0].shape
    shape = backend.get_kv_cache_shape(num_blocks, BLOCK_SIZE, num_kv_heads, head_size)
    kv_cache = torch.full(
        shape, float("nan"), dtype=cache_dtype or dtype, device=device
    )
    # Backwards, so that neighbours in a sequence are not neighbours in memory.
    free = list(range(num_blocks - 1, 0, -1))
    table = torch.zeros(len(seq_lens), max(seq_lens) // BLOCK_SIZE + 2).int()
    slots = []
    for batch_idx, seq_len in enumerate(seq_lens):
        for block in range(-(-seq_len // BLOCK_SIZE)):
            table[batch_idx, block] = free.pop(0)
        tokens = torch.arange(seq_len)
        block_ids = table[batch_idx][tokens // BLOCK_SIZE].long()
        slots.append(block_ids * BLOCK_SIZE + tokens % BLOCK_SIZE)
    backend.write_kv_cache(
        torch.cat(batch.keys).to(device, dtype),
        torch.cat(batch.values).to(device, dtype),
        kv_cache,
        torch.cat(slots).to(device),
    )
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(seq_lens).int().to(device),
        block_table=table.to(device),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_tokens=sum(batch.query_lens),
        max_query_len=max(batch.query_lens),
        max_seq_len=max(seq_lens),
        block_size=BLOCK_SIZE,
        is_causal=is_causal,
    )
    query = batch.query.to(device, dtype)
    out = torch.full_like(query, float("nan"))
    backend.attend(query, kv_cache, metadata, batch.scale, out)
    return out.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_size", [64, 128])
def test_mixed_batch_equals_dense_attention(backend, is_causal, head_size, device):
    # Decodes, whole prefills, a chunk over a cached prefix, and a verification row.
    batch = make_batch(
        [1, 1, 15, 16, 17, 4], [1, 33, 15, 16, 33, 33], head_size=head_size
    )
    where = device if backend is TritonAttentionBackend else "cpu"
    actual = run(backend, batch, is_causal, device=where)
    # Float32 sums in another order than the double ones.
    torch.testing.assert_close(
        actual.double(), batch.expected(is_causal), rtol=1e-5, atol=1e-5
    )


# numpy warns where Triton's interpreter multiplies what is no number.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["keys", "values", "both"])
# The first key that not every row sees, and the last of all.
@pytest.mark.parametrize("position", [17, 19])
def test_a_key_that_is_not_seen_may_be_anything(
    backend, number, where, position, device
):
    """What a rejected draft has in the cache must not reach the rows before it."""
    batch = make_batch([4, 3], [20, 40], num_heads=2)
    expected = batch.expected(True)
    for tensors, name in ((batch.keys, "values"), (batch.values, "keys")):
        if where != name:
            tensors[0][position] = float(number)
    place = device if backend is TritonAttentionBackend else "cpu"
    actual = run(backend, batch, device=place).double()
    # The first request's rows are at the positions 16 to 19.
    are_numbers = actual.isfinite().flatten(1).all(1)
    assert (
        are_numbers.tolist() == [row < position for row in range(16, 20)] + [True] * 3
    )
    torch.testing.assert_close(
        actual[are_numbers], expected[are_numbers], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(4, 4, 8), (2, 1, 80), (6, 2, 32)]
)
def test_odd_sizes_equal_dense_attention(
    backend, num_heads, num_kv_heads, head_size, device
):
    batch = make_batch(
        [2, 1],
        [18, 5],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    where = device if backend is TritonAttentionBackend else "cpu"
    torch.testing.assert_close(
        run(backend, batch, device=where).double(),
        batch.expected(True),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_slots_write_nothing(backend, device):
    where = device if backend is TritonAttentionBackend else torch.device("cpu")
    shape = backend.get_kv_cache_shape(2, BLOCK_SIZE, 1, 16)
    kv_cache = torch.zeros(shape, device=where)
    tokens = torch.ones(3, 1, 16, device=where)
    slots = torch.tensor([-1, 17, -1], device=where)
    backend.write_kv_cache(tokens, tokens, kv_cache, slots)
    assert kv_cache.sum() == 2 * 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_one_projection_are_read_in_place(backend, device):
    batch = make_batch([3], [3], num_heads=2, num_kv_heads=1, head_size=16)
    where = device if backend is TritonAttentionBackend else "cpu"
    plain = run(backend, batch, device=where)
    wide = torch.zeros(3, 4, 16)
    wide[:, :2], wide[:, 2:3], wide[:, 3:] = (
        batch.query,
        batch.keys[0],
        batch.values[0],
    )
    sliced = replace(
        batch, query=wide[:, :2], keys=[wide[:, 2:3]], values=[wide[:, 3:]]
    )
    assert torch.equal(run(backend, sliced, device=where), plain)


def test_bfloat16_is_close_to_dense_attention():
    batch = make_batch([1, 17], [33, 17])
    actual = run(TorchSDPABackend, batch, dtype=torch.bfloat16)
    # bfloat16 has 8 bits: half a percent of values of size one, a few times over.
    torch.testing.assert_close(
        actual.double(), batch.expected(True), rtol=0.05, atol=0.05
    )


# The compiled operators take queries in float32 only.
@pytest.mark.parametrize(
    ("backend", "dtype", "cache_dtype", "tolerance"),
    [
        pytest.param(
            *(CPUAttentionBackend, torch.float32, torch.float16, 1e-5),
            marks=needs_cpu_ops,
        ),
        (TorchSDPABackend, torch.float32, torch.float16, 1e-5),
        (TorchSDPABackend, torch.bfloat16, torch.float32, 0.05),
        (TorchSDPABackend, torch.bfloat16, torch.float16, 0.05),
    ],
)
def test_a_cache_of_another_dtype_equals_attention_over_its_numbers(
    backend, dtype, cache_dtype, tolerance
):
    batch = make_batch([1, 17, 40], [33, 17, 300], num_heads=6, num_kv_heads=2)
    rounded = replace(
        batch,
        keys=[key.to(cache_dtype) for key in batch.keys],
        values=[value.to(cache_dtype) for value in batch.values],
    )
    actual = run(backend, batch, dtype=dtype, cache_dtype=cache_dtype)
    torch.testing.assert_close(
        actual.double(), rounded.expected(True), rtol=tolerance, atol=tolerance
    )


def test_torch_attention_stores_what_no_half_holds_as_the_largest():
    backend = TorchSDPABackend
    shape = backend.get_kv_cache_shape(1, BLOCK_SIZE, 1, 16)
    kv_cache = torch.zeros(shape, dtype=torch.float16)
    tokens = torch.full((1, 1, 16), 1e6)
    backend.write_kv_cache(tokens, -tokens, kv_cache, torch.tensor([3]))
    assert kv_cache[:, 0, 3, 0].unique(dim=1).flatten().tolist() == [65504, -65504]


@needs_cpu_ops
@each_cache
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_cpu_attention_has_the_same_bits_in_any_chunk(chunk, cache_dtype):
    # Long enough for two partitions of keys.
    seq_len = 290
    whole = make_batch([seq_len], [seq_len], num_heads=3)
    expected = run(CPUAttentionBackend, whole, cache_dtype=cache_dtype)
    for start in range(0, seq_len, chunk):
        end = min(start + chunk, seq_len)
        if chunk == 1 and start % 13:
            continue
        part = Batch(
            query=whole.query[start:end],
            keys=[whole.keys[0][:end]],
            values=[whole.values[0][:end]],
            query_lens=[end - start],
            scale=whole.scale,
        )
        actual = run(CPUAttentionBackend, part, cache_dtype=cache_dtype)
        assert torch.equal(actual, expected[start:end])


@needs_cpu_ops
@each_cache
def test_cpu_attention_has_the_same_bits_in_any_batch(cache_dtype):
    alone = make_batch([2], [300])
    others = make_batch([5, 1, 40], [5, 20, 40])
    mixed = Batch(
        query=torch.cat([others.query[:6], alone.query, others.query[6:]]),
        keys=[*others.keys[:2], *alone.keys, *others.keys[2:]],
        values=[*others.values[:2], *alone.values, *others.values[2:]],
        query_lens=[5, 1, 2, 40],
        scale=alone.scale,
    )
    expected = run(CPUAttentionBackend, alone, cache_dtype=cache_dtype)
    actual = run(CPUAttentionBackend, mixed, cache_dtype=cache_dtype)
    assert torch.equal(actual[6:8], expected)


@needs_cpu_ops
@each_cache
@pytest.mark.parametrize("is_causal", [True, False])
def test_cpu_attention_has_the_same_bits_among_many(cache_dtype, is_causal):
    # So many that heads share tiles: decodes, drafts, chunks, long and short ones.
    num_reqs = 4 * torch.get_num_threads() + 1
    query_lens = [(1, 4, 9, 1, 13)[i % 5] for i in range(num_reqs)]
    seq_lens = [(1, 290, 40, 70, 13)[i % 5] for i in range(num_reqs)]
    many = make_batch(query_lens, seq_lens, num_heads=10, num_kv_heads=5, head_size=24)
    together = run(CPUAttentionBackend, many, is_causal, cache_dtype=cache_dtype)
    for batch_idx, actual in enumerate(together.split(query_lens)):
        alone = replace(
            many,
            query=many.query.split(query_lens)[batch_idx],
            keys=[many.keys[batch_idx]],
            values=[many.values[batch_idx]],
            query_lens=[query_lens[batch_idx]],
        )
        expected = run(CPUAttentionBackend, alone, is_causal, cache_dtype=cache_dtype)
        assert torch.equal(actual, expected)


@needs_cpu_ops
@each_cache
def test_cpu_attention_has_the_same_bits_on_any_number_of_threads(cache_dtype):
    # A few long ones, whose partitions several threads share.
    few = make_batch([1, 3], [900, 300], num_heads=4, num_kv_heads=2, head_size=64)
    num_threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(run(CPUAttentionBackend, few, cache_dtype=cache_dtype))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(one, found[0]) for one in found)


def test_selector_takes_the_operators_for_float32_only():
    cpu = torch.device("cpu")
    float32 = CPUAttentionBackend if has_cpu_ops() else TorchSDPABackend
    assert get_attn_backend(cpu, torch.float32) is float32
    assert get_attn_backend(cpu, torch.bfloat16) is TorchSDPABackend
    assert get_attn_backend(torch.device("cuda"), torch.bfloat16) is (
        TritonAttentionBackend
    )


def test_selector_refuses_an_unknown_device():
    with pytest.raises(UnsupportedError, match="--device cpu"):
        get_attn_backend(torch.device("meta"), torch.float32)


def test_cpu_attention_refuses_other_block_sizes():
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        CPUAttentionBackend.get_kv_cache_shape(4, 8, 1, 64)
