"""Quantised products: against the torch twin, and every build against the others."""

import gguf
import numpy as np
import pytest
import torch

from tests.kernels.implementations import BUILDS, all_ops, native_ops, several_builds
from vllm import _cpu_ops_torch

BLOCK_TYPES = ["Q4_0", "Q4_1", "Q8_0"]
TYPES = [*BLOCK_TYPES, "int8"]
block_types = pytest.mark.parametrize("quant_type", BLOCK_TYPES)
all_types = pytest.mark.parametrize("quant_type", TYPES)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def blocks_of(weight: torch.Tensor, quant_type: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[quant_type]
    return torch.from_numpy(gguf.quantize(weight.numpy(), kind))


def pack(ops, weight: torch.Tensor, quant_type: str) -> torch.Tensor:
    if quant_type == "int8":
        return ops.pack_int8(weight)
    return ops.pack_blocks(blocks_of(weight, quant_type), quant_type, weight.shape[1])


def multiply(ops, x, weight, quant_type, bias=None) -> torch.Tensor:
    packed = pack(ops, weight, quant_type)
    return ops.quantized_linear(x, packed, quant_type, weight.shape[0], bias)


def extreme_blocks(quant_type: str) -> torch.Tensor:
    """Return 17 columns of two blocks whose values are all the lowest or highest."""
    header = {"Q4_0": [0, 0x3C], "Q4_1": [0, 0x3C, 0, 0xC0], "Q8_0": [0, 0x3C]}
    lowest, highest = (0x80, 0x7F) if quant_type == "Q8_0" else (0x00, 0xFF)
    num_values = 32 if quant_type == "Q8_0" else 16
    rows = [
        (header[quant_type] + [lowest if column % 2 else highest] * num_values) * 2
        for column in range(17)
    ]
    return torch.tensor(rows, dtype=torch.uint8)


@all_ops
def test_multiplies_whole_numbers_exactly(ops):
    # A largest magnitude of 127 makes steps of one, in x and in the weight.
    x = torch.zeros(2, 32)
    x[0, :3], x[1, :3] = torch.tensor([127.0, 2, -3]), torch.tensor([127.0, 0, 5])
    weight = torch.zeros(3, 32)
    weight[0, 0], weight[1, :2] = 127.0, torch.tensor([127.0, -10.0])
    weight[2, :3] = torch.tensor([-127.0, 1.0, 50.0])
    bias = torch.tensor([0.0, 0.5, 1.0])
    expected = torch.tensor(
        [[16129.0, 16109.5, -16276.0], [16129.0, 16129.5, -15878.0]]
    )
    for quant_type in ("Q8_0", "int8"):
        assert torch.equal(multiply(ops, x, weight, quant_type, bias), expected)


@all_ops
@pytest.mark.parametrize(
    ("header", "expected"),
    [([0x00, 0x40], 2.0 * (3 - 8)), ([0x00, 0x40, 0x00, 0xC2], 2.0 * 3 - 3.0)],
    ids=["Q4_0", "Q4_1"],
)
def test_four_bit_values_have_their_offset_or_minimum(ops, header, expected):
    quant_type = "Q4_0" if len(header) == 2 else "Q4_1"
    # Value 17 is in the high bits of byte 1.
    values = [0x00] * 16
    values[1] = 0x30
    blocks = torch.tensor([header + values], dtype=torch.uint8)
    x = torch.zeros(1, 32)
    x[0, 17] = 127.0
    packed = ops.pack_blocks(blocks, quant_type, 32)
    product = ops.quantized_linear(x, packed, quant_type, 1, None)
    assert product.item() == 127.0 * expected
    row = ops.quantized_rows(packed, quant_type, 1, 32, torch.tensor([0]))
    assert row[0, 17].item() == expected


@native_ops
@all_types
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 12, 13, 25, 70])
@pytest.mark.parametrize(("num_columns", "size"), [(1, 32), (15, 96), (49, 160)])
def test_matches_torch_at_every_tail(ops, quant_type, num_rows, num_columns, size):
    x, weight = draw(num_rows, size), draw(num_columns, size)
    bias = draw(num_columns)
    actual = multiply(ops, x, weight, quant_type, bias)
    expected = multiply(_cpu_ops_torch, x, weight, quant_type, bias)
    # The sums of blocks are equal; they are added in float32 there, in double here.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@native_ops
@pytest.mark.parametrize("size", [1, 3, 17, 31, 33, 70])
def test_int8_takes_sizes_that_are_no_whole_blocks(ops, size):
    x, weight = draw(3, size), draw(19, size)
    expected = multiply(_cpu_ops_torch, x, weight, "int8")
    # One product of whole numbers and scales: the same roundings but for the last.
    actual = multiply(ops, x, weight, "int8")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@native_ops
@block_types
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_sum_of_extreme_values_overflows(ops, quant_type, sign):
    blocks = extreme_blocks(quant_type)
    x = torch.full((5, 64), 127.0 * sign)
    outputs = [
        build.quantized_linear(
            x, build.pack_blocks(blocks, quant_type, 64), quant_type, 17, None
        )
        for build in (ops, _cpu_ops_torch)
    ]
    assert torch.equal(*outputs)


@native_ops
def test_activations_are_rounded_as_the_twin_rounds_them(ops):
    # The unit matrix shows the rounded rows: exact ties, both signs, empty blocks.
    x = draw(9, 96) * torch.logspace(-3, 3, 9)[:, None]
    x[0, :32] = 0.0
    x[1, :32] = torch.arange(32) - 15.5
    x[1, 0] = 127.0
    x[2, :32] = 1e-38
    values, scales = _cpu_ops_torch.quantize_int8(x.unflatten(1, (3, 32)))
    expected = (values * scales).flatten(1)
    ones = torch.zeros(96, 3, 34, dtype=torch.uint8)
    ones[..., 1] = 0x3C
    ones[torch.arange(96), torch.arange(96) // 32, 2 + torch.arange(96) % 32] = 1
    packed = ops.pack_blocks(ones.flatten(1), "Q8_0", 96)
    assert torch.equal(ops.quantized_linear(x, packed, "Q8_0", 96, None), expected)


@all_ops
@all_types
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_spoils_its_row_alone(ops, quant_type, value):
    x, weight = draw(3, 64), draw(20, 64)
    whole = multiply(ops, x, weight, quant_type)
    x[1, 40] = value
    spoiled = multiply(ops, x, weight, quant_type)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[::2], whole[::2])


@all_ops
@block_types
def test_rows_are_those_of_the_file(ops, quant_type):
    weight = draw(37, 64)
    blocks = blocks_of(weight, quant_type)
    kind = gguf.GGMLQuantizationType[quant_type]
    expected = torch.from_numpy(np.array(gguf.dequantize(blocks.numpy(), kind)))
    ids = torch.tensor([36, 0, 15, 16, 0])
    packed = ops.pack_blocks(blocks, quant_type, 64)
    actual = ops.quantized_rows(packed, quant_type, 37, 64, ids)
    assert torch.equal(actual, expected[ids])


@native_ops
def test_int8_rows_are_rounded_as_the_twin_rounds_them(ops):
    weight = draw(21, 70)
    weight[3] = 0.0
    ids = torch.arange(21)
    rows = [
        build.quantized_rows(build.pack_int8(weight), "int8", 21, 70, ids)
        for build in (ops, _cpu_ops_torch)
    ]
    assert torch.equal(*rows)


@all_ops
@all_types
def test_selected_rows_are_those_of_the_weight(ops, quant_type):
    weight, ids = draw(37, 96), torch.tensor([36, 0, 15, 16, 0] * 4)
    packed = pack(ops, weight, quant_type)
    selected = ops.quantized_select(packed, quant_type, 37, 96, ids)
    everything = torch.arange(20)
    assert torch.equal(
        ops.quantized_rows(selected, quant_type, 20, 96, everything),
        ops.quantized_rows(packed, quant_type, 37, 96, ids),
    )
    x = draw(3, 96)
    products = ops.quantized_linear(x, packed, quant_type, 37, None)
    assert torch.equal(
        ops.quantized_linear(x, selected, quant_type, 20, None), products[:, ids]
    )
    with pytest.raises(IndexError, match=r"\[0, 37\)"):
        ops.quantized_select(packed, quant_type, 37, 96, torch.tensor([37]))


@native_ops
@all_types
def test_a_row_has_the_same_bits_beside_any_number_of_rows(ops, quant_type):
    x, packed = draw(530, 192), pack(ops, draw(70, 192), quant_type)
    together = ops.quantized_linear(x, packed, quant_type, 70, None)
    for start, end in [(0, 1), (3, 5), (7, 10), (9, 21), (100, 130), (17, 120)]:
        part = ops.quantized_linear(x[start:end], packed, quant_type, 70, None)
        assert torch.equal(part, together[start:end])


@native_ops
@all_types
def test_threads_do_not_change_a_bit(ops, quant_type):
    x, packed = draw(33, 320), pack(ops, draw(500, 320), quant_type)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.quantized_linear(x, packed, quant_type, 500, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@several_builds
@all_types
@pytest.mark.parametrize("num_rows", [1, 4, 17])
def test_builds_agree_bit_for_bit(quant_type, num_rows):
    x, weight = draw(num_rows, 352), draw(100, 352)
    results = [multiply(ops, x, weight, quant_type) for ops in BUILDS]
    assert all(torch.equal(results[0], result) for result in results[1:])


@native_ops
@all_types
def test_reads_strided_rows_in_place(ops, quant_type):
    wide, packed = draw(4, 100), pack(ops, draw(20, 64), quant_type)
    strided = ops.quantized_linear(wide[:, 30:94], packed, quant_type, 20, None)
    plain = wide[:, 30:94].contiguous()
    assert torch.equal(
        strided, ops.quantized_linear(plain, packed, quant_type, 20, None)
    )


@native_ops
@all_types
def test_no_rows_give_no_rows(ops, quant_type):
    packed = pack(ops, draw(20, 64), quant_type)
    none = ops.quantized_linear(torch.empty(0, 64), packed, quant_type, 20, None)
    assert none.shape == (0, 20)


@all_ops
@block_types
def test_refuses_a_weight_of_another_size(ops, quant_type):
    blocks = blocks_of(draw(20, 64), quant_type)
    with pytest.raises(ValueError, match="bytes a column"):
        ops.pack_blocks(blocks, quant_type, 96)
    with pytest.raises(ValueError, match="bytes a column"):
        ops.pack_blocks(blocks[:, :-1].contiguous(), quant_type, 33)
    packed = ops.pack_blocks(blocks, quant_type, 64)
    with pytest.raises(ValueError, match="columns"):
        ops.quantized_linear(draw(2, 32), packed, quant_type, 20, None)
    with pytest.raises(ValueError, match="columns"):
        ops.quantized_linear(draw(2, 64), packed, quant_type, 40, None)
    with pytest.raises(IndexError, match=r"\[0, 20\)"):
        ops.quantized_rows(packed, quant_type, 20, 64, torch.tensor([20]))


@all_ops
@block_types
def test_four_bits_stay_four_bits(ops, quant_type):
    packed = ops.pack_blocks(blocks_of(draw(32, 576), quant_type), quant_type, 576)
    bits = {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}
    assert packed.numel() * 8 / (32 * 576) == bits[quant_type]


def pack_nothing(ops, quant_type: str) -> torch.Tensor:
    if quant_type == "int8":
        return ops.pack_int8(torch.empty(20, 0))
    return ops.pack_blocks(torch.empty(20, 0, dtype=torch.uint8), quant_type, 0)


@all_ops
@all_types
def test_refuses_a_weight_without_values(ops, quant_type):
    with pytest.raises(ValueError, match="0 values"):
        pack_nothing(ops, quant_type)


@native_ops
@all_types
def test_refuses_a_product_over_nothing(ops, quant_type):
    packed = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="0 values"):
        ops.quantized_linear(torch.empty(3, 0), packed, quant_type, 20, None)
