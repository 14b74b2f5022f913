import math

import pytest
import torch

from tests.kernels.implementations import BUILDS, all_ops, native_ops, several_builds
from vllm import _cpu_ops_torch


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@all_ops
def test_rms_norm_divides_by_the_root_mean_square(ops):
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0])
    # The mean square is 25 / 4, its root 2.5.
    expected = torch.tensor([[1.2, 3.2, 0.0, 0.0]])
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.0, None), expected)


@all_ops
def test_rms_norm_over_heads_may_write_where_it_reads(ops):
    projection = draw(3, 100)
    heads = projection[:, 10:90].view(3, 4, 20)
    expected = _cpu_ops_torch.rms_norm(heads, draw(20), 1e-5, None)
    before = projection.clone()
    ops.rms_norm(heads, draw(20), 1e-5, heads)
    torch.testing.assert_close(heads, expected)
    assert torch.equal(projection[:, :10], before[:, :10])
    assert torch.equal(projection[:, 90:], before[:, 90:])


@all_ops
def test_silu_gates_the_second_half(ops):
    x = torch.tensor([[0.0, 1.0, -1.0, 5.0, 2.0, 10.0]])
    sigmoid = 1 / (1 + math.exp(-1))
    expected = torch.tensor([[0.0, 2 * sigmoid, -10 * (1 - sigmoid)]])
    torch.testing.assert_close(ops.silu_and_mul(x), expected)


@native_ops
def test_silu_is_right_at_the_edges(ops):
    gate = torch.tensor([[1e30, 100.0, 88.5, -87.0, -88.5, -104.0, -1e30, -math.inf]])
    actual = ops.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))[0]
    assert actual[:3].tolist() == gate[0, :3].tolist()
    assert torch.all(actual[3:7].abs() < 1e-34)
    nan = ops.silu_and_mul(torch.tensor([[math.nan, 1.0, 1.0, 1.0]]))
    assert nan.isnan().tolist() == [[True, False]]


@native_ops
def test_silu_gives_a_value_the_same_bits_in_every_place(ops):
    value = 0.7310585
    for size in (1, 15, 16, 17, 33):
        out = ops.silu_and_mul(torch.full((2, 2 * size), value))
        assert out.unique().numel() == 1
        assert out[0, 0] == ops.silu_and_mul(torch.full((1, 2), value))[0, 0]


@native_ops
def test_exponential_is_right_to_two_units_in_the_last_place(ops):
    # silu(x) * 1 / x = 1 / (1 + e^-x).
    x = torch.linspace(-30, 30, 4001)
    actual = ops.silu_and_mul(torch.stack([x, torch.ones_like(x)], dim=1))[:, 0]
    expected = (x.double() * torch.sigmoid(x.double())).float()
    torch.testing.assert_close(actual, expected, rtol=4e-7, atol=0)


@all_ops
def test_rotation_turns_the_halves_against_each_other(ops):
    # Position 1 turns by 90 degrees: (a, b) -> (-b, a).
    cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    k = torch.tensor([[5.0, 6.0], [5.0, 6.0]])
    ops.rotary_embedding(torch.tensor([0, 1]), q, k, cache, 2)
    assert q.tolist() == [[1.0, 2.0, 3.0, 4.0], [-2.0, 1.0, -4.0, 3.0]]
    assert k.tolist() == [[5.0, 6.0], [-6.0, 5.0]]


@all_ops
def test_dimensions_past_the_rotary_ones_stay(ops):
    cache = torch.tensor([[0.0, 1.0]])
    q, k = torch.arange(8.0).view(1, 8), torch.arange(4.0).view(1, 4)
    ops.rotary_embedding(torch.tensor([0]), q, k, cache, 4)
    assert q.tolist() == [[-1.0, 0.0, 2.0, 3.0, -5.0, 4.0, 6.0, 7.0]]
    assert k.tolist() == [[-1.0, 0.0, 2.0, 3.0]]


@native_ops
@pytest.mark.parametrize("size", [1, 15, 16, 33, 576])
def test_layers_match_torch_at_every_tail(ops, size):
    x, weight = draw(5, size + 1)[:, :size], draw(size)
    expected = _cpu_ops_torch.rms_norm(x, weight, 1e-5, None)
    # The squares are summed in another order.
    actual = ops.rms_norm(x, weight, 1e-5, None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@native_ops
def test_columns_of_one_projection_rotate_in_place(ops):
    qkv, cache = draw(7, 5 * 24), draw(50, 24)
    positions = torch.tensor([0, 49, 3, 3, 7, 1, 20])
    expected = qkv.clone()
    for impl, x in ((ops, qkv), (_cpu_ops_torch, expected)):
        impl.rotary_embedding(positions, x[:, :72], x[:, 72:96], cache, 24)
    torch.testing.assert_close(qkv, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(qkv[:, 96:], draw(7, 5 * 24)[:, 96:])


@native_ops
@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_outside_the_cache_is_an_error(ops, position):
    q = draw(1, 24)
    with pytest.raises(IndexError, match="position"):
        ops.rotary_embedding(torch.tensor([position]), q, q.clone(), draw(50, 24), 24)


@native_ops
def test_a_row_has_the_same_bits_alone(ops):
    x, weight = draw(200, 100), draw(50)
    gated = ops.silu_and_mul(x)
    normed = ops.rms_norm(gated, weight, 1e-5, None)
    alone = ops.rms_norm(ops.silu_and_mul(x[70:71]), weight, 1e-5, None)
    assert torch.equal(normed[70:71], alone)


@several_builds
def test_builds_agree_bit_for_bit():
    x, weight = draw(9, 154) * 5, draw(77)
    first, *others = (
        ops.rms_norm(ops.silu_and_mul(x), weight, 1e-5, None) for ops in BUILDS
    )
    assert all(torch.equal(first, other) for other in others)


@native_ops
def test_refuses_shapes_that_do_not_belong_together(ops):
    with pytest.raises(ValueError, match="contiguous"):
        ops.rms_norm(draw(2, 8), draw(7), 1e-5, None)
    with pytest.raises(ValueError, match="contiguous"):
        ops.silu_and_mul(draw(8, 4).t())
    with pytest.raises(ValueError, match="float32"):
        ops.rms_norm(draw(2, 8), draw(8).half(), 1e-5, None)
    with pytest.raises(ValueError, match="heads of 24"):
        ops.rotary_embedding(
            torch.tensor([0]), draw(1, 25), draw(1, 24), draw(50, 24), 24
        )
