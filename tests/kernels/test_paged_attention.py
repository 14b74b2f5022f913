"""The bounds of the attention operators; their values: tests/v1/attention."""

import pytest
import torch

from tests.kernels.implementations import BUILDS, all_ops, native_ops, several_builds
from vllm._custom_ops import cpu_kv_cache_shape


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
) -> torch.Tensor:
    kv_cache = torch.zeros(cpu_kv_cache_shape(3, block_size, 1, 16))
    tokens = torch.arange(20)
    slots = torch.tensor([2, 1, 0])[tokens // block_size] * block_size
    key, value = draw(20, 1, 16), draw(20, 1, 17)[..., :16]
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


@all_ops
def test_one_key_gives_its_value(ops):
    out = attend(ops, seq_len=1, query_len=1, num_rows=1)
    torch.testing.assert_close(out, draw(20, 1, 17)[:1, :, :16].expand(1, 3, 16))


@native_ops
def test_block_size_does_not_change_a_bit(ops):
    assert torch.equal(attend(ops), attend(ops, block_size=32, blocks=(2,)))


@native_ops
def test_rows_past_the_last_request_are_not_written(ops):
    out = attend(ops, num_rows=3)
    assert out.isnan().flatten(1).all(1).tolist() == [False, False, True]


@several_builds
@pytest.mark.parametrize("query_len", [1, 2, 20])
def test_builds_agree_bit_for_bit(query_len):
    first, *others = (attend(ops, query_len=query_len, num_rows=20) for ops in BUILDS)
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
