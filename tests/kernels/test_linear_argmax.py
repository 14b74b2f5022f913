"""The argmax of products that are not written: against the products that are."""

import pytest
import torch

from tests.kernels.implementations import all_ops, native_ops
from tests.kernels.test_quantized import TYPES, draw, pack
from vllm import _cpu_ops_torch

NAN, INF = float("nan"), float("inf")
all_types = pytest.mark.parametrize("quant_type", ["float32", *TYPES])
# What fills a block's range, so that its values are whole steps of one.
EXTREMES = {
    "float32": (0.0, 1.0),
    "Q4_0": (-8.0, 7.0),
    "Q4_1": (0.0, 15.0),
    "Q8_0": (-127.0, 127.0),
    "int8": (-127.0, 127.0),
}


def pack_any(ops, weight: torch.Tensor, quant_type: str) -> torch.Tensor:
    if quant_type == "float32":
        return ops.pack_weight(weight)
    return pack(ops, weight, quant_type)


def multiply(ops, x, packed, quant_type, num_columns, bias=None) -> torch.Tensor:
    if quant_type == "float32":
        return ops.packed_linear(x, packed, num_columns, bias)
    return ops.quantized_linear(x, packed, quant_type, num_columns, bias)


def argmax_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax by a walk over each row, as it is defined."""
    best = []
    for row in logits.tolist():
        value, column = -INF, -1
        for token_id, logit in enumerate(row):
            if logit > value:
                value, column = logit, token_id
        best.append(column)
    return torch.tensor(best, dtype=torch.int64)


def whole_numbers(quant_type: str, num_rows: int, num_columns: int):
    """Return x and a weight whose products are exact, and few enough to be equal."""
    generator = torch.Generator().manual_seed(num_rows + num_columns)
    weight = torch.randint(0, 2, (num_columns, 64), generator=generator).float()
    weight[:, ::32], weight[:, 1::32] = EXTREMES[quant_type]
    x = torch.randint(-1, 2, (num_rows, 64), generator=generator).float()
    x[:, ::32] = 127.0
    return x, weight


@all_ops
@all_types
def test_the_largest_product_leads(ops, quant_type):
    low, high = EXTREMES[quant_type]
    weight = torch.full((3, 32), low)
    weight[0, 0], weight[1, :2], weight[2, 1] = high, high, high
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 1], x[2, :2] = 127.0, 127.0, 127.0
    packed = pack_any(ops, weight, quant_type)
    best = ops.linear_argmax(x, packed, quant_type, 3, None)
    assert best.tolist() == [0, 1, 1]
    bias = torch.tensor([0.0, 0.0, 1e6])
    assert ops.linear_argmax(x, packed, quant_type, 3, bias).tolist() == [2, 2, 2]


@all_ops
@all_types
@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 70])
@pytest.mark.parametrize("num_columns", [1, 16, 49, 1030])
def test_is_the_argmax_of_the_product(ops, quant_type, num_rows, num_columns):
    x, bias = draw(num_rows, 96), draw(num_columns)
    packed = pack_any(ops, draw(num_columns, 96), quant_type)
    for added in (None, bias):
        products = multiply(ops, x, packed, quant_type, num_columns, added)
        best = ops.linear_argmax(x, packed, quant_type, num_columns, added)
        assert torch.equal(best, argmax_of(products))


@native_ops
@all_types
@pytest.mark.parametrize("num_rows", range(1, 14))
def test_equals_the_twin_where_many_products_are_equal(ops, quant_type, num_rows):
    x, weight = whole_numbers(quant_type, num_rows, 333)
    best, expected = (
        each.linear_argmax(x, pack_any(each, weight, quant_type), quant_type, 333, None)
        for each in (ops, _cpu_ops_torch)
    )
    assert torch.equal(best, expected)


@native_ops
@all_types
def test_the_first_of_equal_ones_leads_whoever_computes_it(ops, quant_type):
    # Every column stands in many tiles and in every thread's part.
    x, weight = draw(33, 64), draw(37, 64)
    packed = pack_any(ops, weight.repeat(40, 1), quant_type)
    first = multiply(ops, x, pack_any(ops, weight, quant_type), quant_type, 37)
    expected = argmax_of(first)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (slice(0, 33), slice(4, 5), slice(9, 16)):
                best = ops.linear_argmax(x[rows], packed, quant_type, 37 * 40, None)
                assert torch.equal(best, expected[rows])
    finally:
        torch.set_num_threads(threads)


@all_ops
@all_types
def test_nan_and_minus_infinity_never_lead(ops, quant_type):
    x, packed = draw(6, 64), pack_any(ops, draw(70, 64), quant_type)
    x[1, 5], x[4, 63] = NAN, NAN
    bias = torch.zeros(70)
    bias[::3], bias[1::3] = NAN, -INF
    products = multiply(ops, x, packed, quant_type, 70, bias)
    best = ops.linear_argmax(x, packed, quant_type, 70, bias)
    assert torch.equal(best, argmax_of(products))
    assert best[[1, 4]].tolist() == [-1, -1]
    assert bool((best[[0, 2, 3, 5]] % 3 == 2).all())
    bias[:] = -INF
    assert ops.linear_argmax(x, packed, quant_type, 70, bias).tolist() == [-1] * 6
    bias[[40, 69]] = INF
    best = ops.linear_argmax(x, packed, quant_type, 70, bias)
    assert best.tolist() == [40, -1, 40, 40, -1, 40]


@native_ops
@all_types
def test_what_pads_the_last_columns_never_leads(ops, quant_type):
    # The padding's products are 0, and all others below.
    x, weight = torch.ones(3, 32), -1.0 - torch.rand(5, 32)
    packed = pack_any(ops, weight, quant_type)
    products = multiply(ops, x, packed, quant_type, 5)
    assert bool((products < 0).all())
    best = ops.linear_argmax(x, packed, quant_type, 5, None)
    assert torch.equal(best, argmax_of(products))


@native_ops
@all_types
def test_reads_strided_rows_in_place(ops, quant_type):
    wide, packed = draw(4, 100), pack_any(ops, draw(20, 64), quant_type)
    best = ops.linear_argmax(wide[:, 30:94], packed, quant_type, 20, None)
    plain = wide[:, 30:94].contiguous()
    assert torch.equal(best, ops.linear_argmax(plain, packed, quant_type, 20, None))


@all_ops
@all_types
def test_no_rows_give_none(ops, quant_type):
    packed = pack_any(ops, draw(20, 64), quant_type)
    none = ops.linear_argmax(torch.empty(0, 64), packed, quant_type, 20, None)
    assert (none.shape, none.dtype) == ((0,), torch.int64)


@native_ops
@all_types
def test_refuses_a_weight_of_another_size(ops, quant_type):
    packed = pack_any(ops, draw(20, 64), quant_type)
    with pytest.raises(ValueError, match="columns"):
        ops.linear_argmax(draw(2, 32), packed, quant_type, 20, None)
    with pytest.raises(ValueError, match="columns"):
        ops.linear_argmax(draw(2, 64), packed, quant_type, 40, None)
    with pytest.raises(ValueError, match="20 contiguous"):
        ops.linear_argmax(draw(2, 64), packed, quant_type, 20, draw(19))
