from dataclasses import astuple, fields

import pytest
import torch

from tests.markers import needs_cpu_ops
from vllm.v1.worker.gpu.spec_decode.dspark import inputs

slots_of = pytest.mark.parametrize(
    "impl",
    [
        inputs._find_context_slots_torch,
        inputs.find_context_slots,
        inputs._find_context_slots_triton,
    ],
    ids=["torch", "chosen", "triton"],
)


def lay_out_torch(*arguments):
    *arguments, shape = arguments
    made = inputs._lay_out_blocks_torch(*arguments, *astuple(shape))
    return inputs.BlockInputs(*made)


def lay_out_triton(*arguments):
    *arguments, shape = arguments
    made = inputs._lay_out_blocks_triton(*arguments, *astuple(shape))
    return inputs.BlockInputs(*made)


layouts = pytest.mark.parametrize(
    "impl",
    [lay_out_torch, inputs.lay_out_blocks, lay_out_triton],
    ids=["torch", "chosen", "triton"],
)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def find(impl, device, max_len):
    # Five tokens of a request that now has 8 computed, then two of one with 2.
    return impl(
        int32([[1, 2, 3], [9, 9, 9], [6, 7, 8]], device),
        int32([2, 0], device),
        int32([0, 5, 7], device),
        torch.tensor([5, 6, 7, 8, 9, 0, 1], device=device),
        int32([2, 0, 8], device),
        4,
        max_len,
    ).tolist()


@slots_of
def test_rejected_drafts_are_no_context(impl, device):
    assert find(impl, device, 100) == [29, 30, 31, -1, -1, 4, 5]


@slots_of
def test_context_ends_where_the_drafters_does(impl, device):
    assert find(impl, device, 7) == [29, 30, -1, -1, -1, 4, 5]


@pytest.mark.parametrize("query_len", [1, 1023, 1024, 2049])
@pytest.mark.parametrize(
    "impl",
    [inputs.find_context_slots, inputs._find_context_slots_triton],
    ids=["chosen", "triton"],
)
def test_the_kernel_finds_the_slots_that_its_twin_finds(impl, query_len, device):
    generator = torch.Generator().manual_seed(query_len)
    rows = torch.randint(0, 10**6, (5, 200), generator=generator)
    positions = torch.cat(
        [torch.arange(30, 30 + query_len), torch.arange(3), torch.arange(7, 8)]
    )
    args = (
        int32(rows.tolist(), device),
        int32([3, 0, 4], device),
        int32([0, query_len, query_len + 3, query_len + 4], device),
        positions.to(device),
        int32([3, 0, 0, 30 + query_len // 2, 7], device),
        16,
        1500,
    )
    assert torch.equal(impl(*args), inputs._find_context_slots_torch(*args))


@needs_cpu_ops
def test_what_has_no_block_is_refused():
    rows, one = int32([[1, 2]], "cpu"), int32([0, 1], "cpu")
    arguments = [rows, int32([0], "cpu"), one, torch.tensor([8]), int32([9], "cpu")]
    with pytest.raises(IndexError, match="no blocks"):
        inputs.find_context_slots(*arguments, 4, 100)
    arguments[1] = int32([1], "cpu")
    with pytest.raises(IndexError, match="no blocks"):
        inputs.find_context_slots(*arguments, 4, 5)
    # A fault would write before the array.
    arguments[1:3] = int32([0, 0], "cpu"), int32([0, -1, 1], "cpu")
    with pytest.raises(IndexError, match="no blocks"):
        inputs.find_context_slots(*arguments, 4, 5)
    with pytest.raises(IndexError, match="no block"):
        blocks(inputs.lay_out_blocks, "cpu", 100, anchors=(3, 10))
    with pytest.raises(IndexError, match="no row"):
        blocks(inputs.lay_out_blocks, "cpu", 100, rows=(0, 3))
    with pytest.raises(IndexError, match="4 of 3 blocks"):
        blocks(inputs.lay_out_blocks, "cpu", 100, num_blocks=4)


def blocks(impl, device, max_len, anchors=(3, 6), rows=(2, 0), num_blocks=3):
    # Token 10 * row + position, in rows of eight tokens.
    tokens = torch.arange(3).unsqueeze(1) * 10 + torch.arange(8)
    num_computed = [anchors[1], 0, anchors[0]]
    return impl(
        int32(tokens.tolist(), device),
        int32(num_computed, device),
        int32([[1, 2, 3], [9, 9, 9], [5, 6, 7]], device),
        int32(rows, device),
        num_blocks,
        inputs.BlockShape(
            num_slots=3,
            num_silent=1,
            max_drafts=2,
            mask_token_id=99,
            block_size=4,
            max_len=max_len,
        ),
    )


@layouts
def test_a_block_starts_at_the_anchor_and_goes_on_with_masks(impl, device):
    got = blocks(impl, device, 100)
    assert got.input_ids.tolist() == [23, 99, 99, 6, 99, 99]
    assert got.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert got.slot_mapping.tolist() == [23, 24, 25, 10, 11, 12]
    assert got.seq_lens.tolist() == [6, 9]
    assert got.query_start_loc.tolist() == [0, 3, 6]
    assert got.anchors.tolist() == [3, 6]
    assert got.anchor_ids.tolist() == [23, 6]
    assert got.block_table.tolist() == [[5, 6, 7], [1, 2, 3]]


@layouts
def test_what_has_no_place_is_not_written(impl, device):
    got = blocks(impl, device, 5)
    assert got.positions.tolist() == [3, 4, 0, 0, 0, 0]
    assert got.slot_mapping.tolist() == [23, 24, -1, -1, -1, -1]
    assert got.seq_lens.tolist() == [5, 5]


@layouts
def test_drafts_end_with_the_context(impl, device):
    # The first of three slots is silent: its draft would be of the slot behind it.
    assert blocks(impl, device, 100).num_drafts.tolist() == [2, 2]
    assert blocks(impl, device, 8).num_drafts.tolist() == [2, 1]
    assert blocks(impl, device, 6).num_drafts.tolist() == [2, 0]
    assert blocks(impl, device, 4).num_drafts.tolist() == [0, 0]


@layouts
def test_a_token_that_was_not_kept_has_the_last_one_in_its_place(impl, device):
    got = blocks(impl, device, 8, anchors=(3, 8))
    assert got.anchors.tolist() == [3, 8]
    assert got.anchor_ids.tolist() == [23, 7]
    assert got.num_drafts.tolist() == [2, 0]


@pytest.mark.parametrize("num_slots", [1, 3, 4, 9])
@pytest.mark.parametrize("num_reqs", [1, 5])
@pytest.mark.parametrize(
    "impl", [inputs.lay_out_blocks, lay_out_triton], ids=["chosen", "triton"]
)
def test_the_kernel_lays_out_blocks_as_its_twin_does(impl, num_reqs, num_slots, device):
    generator = torch.Generator().manual_seed(num_slots)

    def draw(high, *shape):
        values = torch.randint(0, high, shape, generator=generator)
        return values.to(torch.int32).to(device)

    args = (
        draw(1000, 7, 20),
        draw(21, 7),
        draw(500, 7, 300),
        draw(7, num_reqs),
        290,
        inputs.BlockShape(num_slots, num_slots // 2, 3, 99, 4, 22),
    )
    expected, got = lay_out_torch(*args), impl(*args)
    for field in fields(inputs.BlockInputs):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name))
