"""The statistics of products that are not written: against the products that are."""

import pytest
import torch

from tests.kernels.implementations import all_ops, native_ops
from tests.kernels.test_linear_argmax import (
    all_types,
    argmax_of,
    multiply,
    pack_any,
    whole_numbers,
)
from tests.kernels.test_quantized import draw
from vllm import _cpu_ops_torch

NAN, INF = float("nan"), float("inf")
# Of a sum of e^logit that is one number; see csrc/cpu/softmax.h.
SEGMENT = 512


def statistics(
    ops, x, packed, quant_type, num_columns, count, *, bias=None, rows=None, written=()
):
    if rows is None:
        rows = torch.arange(len(x))
    written = torch.tensor(written, dtype=torch.int64)
    return ops.linear_statistics(
        x, packed, quant_type, num_columns, bias, rows, count, written
    )


def likeliest_of(products: torch.Tensor, count: int) -> list[list[int]]:
    """Return the first columns by Python's own sort, as they are defined."""
    keys = [
        [(value != value, 0.0 if value != value else -value) for value in row]
        for row in products.tolist()
    ]
    # Python's sort leaves equal ones in their order.
    return [sorted(range(len(row)), key=row.__getitem__)[:count] for row in keys]


def assert_says(found, products: torch.Tensor, count: int) -> None:
    assert torch.equal(found.argmax, argmax_of(products))
    assert found.ids.tolist() == likeliest_of(products, count)
    assert torch.equal(
        found.products.view(torch.int32),
        products.gather(1, found.ids).view(torch.int32),
    )


@all_ops
@all_types
@pytest.mark.parametrize("num_rows", [1, 3, 7, 30])
@pytest.mark.parametrize("num_columns", [7, 49, SEGMENT, SEGMENT + 1, 3 * SEGMENT - 9])
def test_are_those_of_the_product(ops, quant_type, num_rows, num_columns):
    x, bias, count = draw(num_rows, 96), draw(num_columns), 7
    packed = pack_any(ops, draw(num_columns, 96), quant_type)
    for added in (None, bias):
        products = multiply(ops, x, packed, quant_type, num_columns, added)
        found = statistics(ops, x, packed, quant_type, num_columns, count, bias=added)
        assert_says(found, products, count)
        # Those of rows that are written have the same bits.
        logsumexp, _ = ops.logprob_stats(products, found.argmax)
        assert torch.equal(found.logsumexp, logsumexp)
        expected = products.double().logsumexp(-1).float()
        torch.testing.assert_close(found.logsumexp, expected, rtol=1e-6, atol=1e-6)


@native_ops
@all_types
@pytest.mark.parametrize("count", [1, 2, 20, 64])
def test_equal_the_twin_where_many_products_are_equal(ops, quant_type, count):
    x, weight = whole_numbers(quant_type, 9, 700)
    found, expected = (
        statistics(each, x, pack_any(each, weight, quant_type), quant_type, 700, count)
        for each in (ops, _cpu_ops_torch)
    )
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(found.logsumexp, expected.logsumexp)


@native_ops
@all_types
def test_their_bits_depend_on_the_row_alone(ops, quant_type):
    num_columns, count = 5 * SEGMENT + 77, 20
    x, packed = draw(40, 64), pack_any(ops, draw(num_columns, 64), quant_type)
    whole = statistics(ops, x, packed, quant_type, num_columns, count)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for rows in (slice(0, 40), slice(4, 5), slice(9, 16)):
                part = statistics(ops, x[rows], packed, quant_type, num_columns, count)
                for ours, theirs in zip(part[:4], whole[:4], strict=True):
                    assert torch.equal(ours, theirs[rows])
    finally:
        torch.set_num_threads(threads)


@all_ops
@all_types
def test_rows_that_are_not_listed_have_their_argmax_alone(ops, quant_type):
    x, packed = draw(11, 64), pack_any(ops, draw(600, 64), quant_type)
    everything = statistics(ops, x, packed, quant_type, 600, 5)
    rows = torch.tensor([0, 3, 10])
    found = statistics(ops, x, packed, quant_type, 600, 5, rows=rows)
    assert torch.equal(found.argmax, everything.argmax)
    for ours, theirs in zip(found[1:4], everything[1:4], strict=True):
        assert torch.equal(ours, theirs[rows])
    none = statistics(ops, x, packed, quant_type, 600, 5, rows=rows[:0])
    assert torch.equal(none.argmax, everything.argmax)
    assert [tensor.shape[0] for tensor in none[1:]] == [0, 0, 0, 0]


@all_ops
@all_types
@pytest.mark.parametrize("num_columns", [5, SEGMENT, 2 * SEGMENT + 9])
def test_whole_rows_are_written_where_they_are_wanted(ops, quant_type, num_columns):
    x, packed = draw(30, 64), pack_any(ops, draw(num_columns, 64), quant_type)
    products = multiply(ops, x, packed, quant_type, num_columns)
    rows = torch.tensor([1, 4, 29])
    for written in ([], [0], [1, 2, 29], [*range(30)]):
        found = statistics(
            ops, x, packed, quant_type, num_columns, 3, rows=rows, written=written
        )
        assert torch.equal(found.written, products[written])
        assert torch.equal(found.argmax, argmax_of(products))
        assert found.ids.tolist() == likeliest_of(products[rows], 3)


@native_ops
@all_types
@pytest.mark.parametrize("num_columns", [30, 2 * SEGMENT + 30])
def test_what_is_no_number_comes_last(ops, quant_type, num_columns):
    x = draw(4, 64)
    x[2, 5] = NAN
    packed = pack_any(ops, draw(num_columns, 64), quant_type)
    for numbers in ([], [1], [2, 5, num_columns - 1]):
        for other in (-INF, NAN, INF):
            bias = torch.full((num_columns,), NAN)
            bias[::3] = -INF
            bias[numbers] = 0.0
            bias[num_columns // 2] = other
            products = multiply(ops, x, packed, quant_type, num_columns, bias)
            found = statistics(ops, x, packed, quant_type, num_columns, 6, bias=bias)
            assert_says(found, products, 6)
            logsumexp, _ = ops.logprob_stats(products, found.argmax.clamp(min=0))
            assert torch.equal(
                found.logsumexp.view(torch.int32), logsumexp.view(torch.int32)
            )
            written = ops.likeliest_tokens(products, 6)
            assert torch.equal(found.ids, written)


@native_ops
def test_minus_infinity_counts_nothing(ops):
    # Whole segments of it too, beside logits that are far below zero.
    num_columns = 3 * SEGMENT
    x, weight = draw(2, 64), draw(num_columns, 64)
    bias = torch.full((num_columns,), -INF)
    bias[SEGMENT + 3 : SEGMENT + 9] = -900.0
    packed = ops.pack_weight(weight)
    found = statistics(ops, x, packed, "float32", num_columns, 9, bias=bias)
    expected = multiply(ops, x, packed, "float32", num_columns, bias).logsumexp(-1)
    torch.testing.assert_close(found.logsumexp, expected)


@native_ops
def test_refuse_rows_and_columns_that_are_not_there(ops):
    x, packed = draw(4, 64), ops.pack_weight(draw(70, 64))
    for rows in ([0, 4], [-1], [1, 1], [2, 1]):
        with pytest.raises(IndexError, match="not increasing"):
            statistics(ops, x, packed, "float32", 70, 3, rows=torch.tensor(rows))
        with pytest.raises(IndexError, match="not increasing"):
            statistics(ops, x, packed, "float32", 70, 3, written=rows)
    for count in (0, 65):
        with pytest.raises(IndexError, match="columns"):
            statistics(ops, x, packed, "float32", 70, count)
    few = ops.pack_weight(draw(5, 64))
    with pytest.raises(IndexError, match="6 of 5 columns"):
        statistics(ops, x, few, "float32", 5, 6)
