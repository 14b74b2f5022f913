import pytest
import torch
import torch.nn.functional as F

from tests.kernels.implementations import BUILDS, all_ops, native_ops, several_builds


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@all_ops
def test_multiplies_by_the_transposed_weight(ops):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [10.0, 100.0]])
    bias = torch.tensor([0.0, 0.5, 1.0])
    packed = ops.pack_weight(weight)
    expected = torch.tensor([[1.0, 2.5, 211.0], [3.0, 4.5, 431.0]])
    assert torch.equal(ops.packed_linear(x, packed, 3, bias), expected)


@native_ops
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 12, 13, 25, 300])
@pytest.mark.parametrize(("num_columns", "size"), [(1, 1), (15, 3), (16, 30), (49, 70)])
def test_matches_torch_at_every_tail(ops, num_rows, num_columns, size):
    x, weight, bias = draw(num_rows, size), draw(num_columns, size), draw(num_columns)
    actual = ops.packed_linear(x, ops.pack_weight(weight), num_columns, bias)
    # Sums in another order.
    torch.testing.assert_close(actual, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@native_ops
def test_a_row_has_the_same_bits_beside_any_number_of_rows(ops):
    x, packed = draw(130, 200), ops.pack_weight(draw(70, 200))
    together = ops.packed_linear(x, packed, 70, None)
    for start, end in [(0, 1), (3, 5), (7, 10), (9, 21), (100, 130), (17, 120)]:
        part = ops.packed_linear(x[start:end], packed, 70, None)
        assert torch.equal(part, together[start:end])


@native_ops
def test_threads_do_not_change_a_bit(ops):
    x, packed = draw(33, 300), ops.pack_weight(draw(500, 300))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.packed_linear(x, packed, 500, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@several_builds
def test_builds_agree_bit_for_bit():
    x, weight = draw(17, 333), draw(100, 333)
    first, *others = (
        ops.packed_linear(x, ops.pack_weight(weight), 100, None) for ops in BUILDS
    )
    assert all(torch.equal(first, other) for other in others)


@native_ops
def test_reads_strided_rows_in_place(ops):
    wide, packed = draw(4, 100), ops.pack_weight(draw(20, 40))
    strided = ops.packed_linear(wide[:, 30:70], packed, 20, None)
    plain = ops.packed_linear(wide[:, 30:70].contiguous(), packed, 20, None)
    assert torch.equal(strided, plain)


@all_ops
@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_product_over_nothing_is_the_bias(ops, num_rows):
    packed, bias = ops.pack_weight(torch.empty(20, 0)), draw(20)
    product = ops.packed_linear(torch.empty(num_rows, 0), packed, 20, bias)
    assert torch.equal(product, bias.expand(num_rows, 20))


@native_ops
def test_no_rows_give_no_rows(ops):
    packed = ops.pack_weight(draw(20, 40))
    assert ops.packed_linear(torch.empty(0, 40), packed, 20, None).shape == (0, 20)


@native_ops
def test_refuses_a_weight_of_another_size(ops):
    packed = ops.pack_weight(draw(20, 40))
    with pytest.raises(ValueError, match="columns"):
        ops.packed_linear(draw(2, 41), packed, 20, None)
    with pytest.raises(ValueError, match="columns"):
        ops.packed_linear(draw(2, 40), packed, 33, None)
