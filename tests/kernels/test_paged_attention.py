"""The bounds of the attention operators; their values: tests/v1/attention."""

import pytest
import torch

from tests.kernels.implementations import BUILDS, all_ops, native_ops, several_builds
from vllm import _cpu_ops_torch
from vllm._custom_ops import cpu_kv_cache_shape

each_cache = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(
    ops,
    *,
    seq_len: int = 20,
    query_len: int = 2,
    blocks: tuple[int, ...] = (2, 1),
    block_size: int = 16,
    num_rows: int = 2,
    dtype: torch.dtype = torch.float32,
    last: float | None = None,
) -> torch.Tensor:
    kv_cache = torch.zeros(cpu_kv_cache_shape(3, block_size, 1, 16), dtype=dtype)
    tokens = torch.arange(20)
    slots = torch.tensor([2, 1, 0])[tokens // block_size] * block_size
    key, value = draw(20, 1, 16), draw(20, 1, 17)[..., :16]
    if last is not None:
        key[-1] = value[-1] = last
    ops.reshape_and_cache(key, value, kv_cache, slots + tokens % block_size)
    query = draw(num_rows, 3, 16)
    out = torch.full_like(query, float("nan"))
    ops.paged_attention(
        query,
        kv_cache,
        torch.tensor([blocks], dtype=torch.int32),
        torch.tensor([0, query_len], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        0.25,
        out,
        True,
    )
    return out


def cache_tokens(ops, tokens: torch.Tensor) -> torch.Tensor:
    """Return a half cache of tokens [T, heads, size] as keys, negated as values."""
    num_tokens, num_heads, head_size = tokens.shape
    shape = cpu_kv_cache_shape(-(-num_tokens // 16), 16, num_heads, head_size)
    kv_cache = torch.zeros(shape, dtype=torch.float16)
    ops.reshape_and_cache(tokens, -tokens, kv_cache, torch.arange(num_tokens))
    return kv_cache


@all_ops
@each_cache
def test_one_key_gives_its_value(ops, dtype):
    out = attend(ops, seq_len=1, query_len=1, num_rows=1, dtype=dtype)
    value = draw(20, 1, 17)[:1, :, :16].to(dtype).float()
    torch.testing.assert_close(out, value.expand(1, 3, 16))


@native_ops
@each_cache
def test_block_size_does_not_change_a_bit(ops, dtype):
    small = attend(ops, dtype=dtype)
    large = attend(ops, dtype=dtype, block_size=32, blocks=(2,))
    assert torch.equal(small, large)


@native_ops
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "query_len", "seq_len"),
    [(3, 1, 24, 1, 1), (6, 2, 80, 5, 33), (8, 1, 8, 2, 300), (4, 4, 64, 20, 20)],
)
def test_a_half_cache_means_what_its_twin_says(
    ops, num_heads, num_kv_heads, head_size, query_len, seq_len
):
    kv_cache = cache_tokens(ops, draw(seq_len, num_kv_heads, head_size))
    query = draw(query_len, num_heads, head_size)
    blocks = torch.arange(-(-seq_len // 16), dtype=torch.int32)[None]
    results = []
    for one in (ops, _cpu_ops_torch):
        results.append(torch.empty_like(query))
        starts, lens = torch.tensor([0, query_len]), torch.tensor([seq_len])
        one.paged_attention(
            query,
            kv_cache,
            blocks,
            starts.int(),
            lens.int(),
            0.25,
            results[-1],
            True,
        )
    # Both multiply the same halves in float32, in another order.
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@native_ops
def test_a_half_cache_has_the_bits_of_its_twin(ops):
    patterns = torch.randint(
        -(2**31), 2**31, (64, 2, 40), generator=torch.Generator().manual_seed(0)
    )
    tokens = patterns.int().view(torch.float32)
    # Ties, the smallest halves, and what is beyond them.
    edges = [1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 3 * 2**-25, 2**-14, -0.0]
    tokens[0, 0, : len(edges)] = torch.tensor(edges)
    # Which of the NaNs a NaN becomes is left open.
    tokens = tokens.nan_to_num(nan=0.5, posinf=float("inf"), neginf=float("-inf"))
    native, twin = cache_tokens(ops, tokens), cache_tokens(_cpu_ops_torch, tokens)
    assert torch.equal(native.view(torch.int16), twin.view(torch.int16))


@all_ops
@pytest.mark.parametrize("head_size", [16, 40, 64])
def test_a_block_holds_what_one_pass_over_it_reads(ops, head_size):
    tokens = draw(20, 2, head_size)
    kv_cache = cache_tokens(ops, tokens)
    width = -(-head_size // 16) * 16
    panel = 16 if width % 32 else 32
    # Of the second block and head, one token and column.
    keys, values = kv_cache[1, :, 1].reshape(2, -1)
    offset, column = 3, head_size - 1
    first = column // panel * panel * 16 + column % panel
    expected = tokens[16 + offset, 1, column].half()
    assert keys[column * 16 + offset] == expected
    assert values[first + offset * panel] == -expected


@native_ops
def test_a_cache_of_keys_and_values_apart_is_an_error(ops):
    tokens = draw(1, 1, 16)
    kv_cache = torch.zeros(2, 3, 1, 16, 16)
    with pytest.raises(ValueError, match="shape"):
        ops.reshape_and_cache(tokens, tokens, kv_cache, torch.tensor([0]))


@all_ops
def test_what_no_half_holds_is_the_largest_and_nan_stays_nan(ops):
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([65504.0, 65519.0, 65520.0, 7e4, -7e4, inf, -inf, nan])
    kv_cache = cache_tokens(ops, values.view(1, 1, 8))
    largest = 65504.0
    expected = [largest] * 4 + [-largest, largest, -largest, nan]
    stored = kv_cache[0, 1, 0].flatten()[:8].float()
    torch.testing.assert_close(
        stored, -torch.tensor(expected), rtol=0, atol=0, equal_nan=True
    )


@native_ops
def test_a_cache_of_another_dtype_is_an_error(ops):
    with pytest.raises(ValueError, match="float32"):
        attend(ops, dtype=torch.bfloat16)


@all_ops
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_key_that_is_not_seen_may_be_anything(ops, number):
    shape = {"query_len": 3, "num_rows": 3}
    plain, spoiled = attend(ops, **shape), attend(ops, **shape, last=float(number))
    assert torch.equal(plain[:2], spoiled[:2])
    assert not spoiled[2].isfinite().any()


@native_ops
def test_rows_past_the_last_request_are_not_written(ops):
    out = attend(ops, num_rows=3)
    assert out.isnan().flatten(1).all(1).tolist() == [False, False, True]


@several_builds
@each_cache
@pytest.mark.parametrize("query_len", [1, 2, 20])
def test_builds_agree_bit_for_bit(query_len, dtype):
    first, *others = (
        attend(ops, query_len=query_len, num_rows=20, dtype=dtype) for ops in BUILDS
    )
    assert all(torch.equal(first[:query_len], rows[:query_len]) for rows in others)


@native_ops
@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": (2, 3)},
        {"blocks": (-1, 1)},
        {"blocks": (2,)},
        {"query_len": 3},
        {"seq_len": 1},
    ],
)
def test_a_request_outside_its_arrays_is_an_error(ops, wrong):
    with pytest.raises(IndexError, match="outside"):
        attend(ops, **wrong)


@native_ops
def test_a_slot_outside_the_cache_is_an_error(ops):
    kv_cache = torch.zeros(cpu_kv_cache_shape(1, 16, 1, 16))
    tokens = draw(1, 1, 16)
    with pytest.raises(IndexError, match="slot"):
        ops.reshape_and_cache(tokens, tokens, kv_cache, torch.tensor([16]))
