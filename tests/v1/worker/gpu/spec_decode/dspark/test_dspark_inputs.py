from dataclasses import fields

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.dspark import inputs

drops = pytest.mark.parametrize(
    "impl",
    [inputs._drop_rejected_slots_torch, inputs._drop_rejected_slots_triton],
    ids=["torch", "triton"],
)
layouts = pytest.mark.parametrize(
    "impl",
    [inputs._lay_out_blocks_torch, inputs._lay_out_blocks_triton],
    ids=["torch", "triton"],
)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def drop(impl, device, max_len):
    # Five tokens of a request that now has 8 computed, then two of one with 2.
    return impl(
        torch.tensor([26, 27, 28, 29, 30, 4, 5], device=device),
        torch.tensor([5, 6, 7, 8, 9, 0, 1], device=device),
        int32([0, 5, 7], device),
        int32([8, 2], device),
        max_len,
    ).tolist()


@drops
def test_rejected_drafts_are_no_context(impl, device):
    assert drop(impl, device, 100) == [26, 27, 28, -1, -1, 4, 5]


@drops
def test_context_ends_where_the_drafters_does(impl, device):
    assert drop(impl, device, 7) == [26, 27, -1, -1, -1, 4, 5]


@pytest.mark.parametrize("query_len", [1, 1023, 1024, 2049])
def test_the_kernel_drops_what_its_twin_drops(query_len, device):
    generator = torch.Generator().manual_seed(query_len)
    num_tokens = query_len + 4
    slots = torch.randint(0, 10**6, (num_tokens,), generator=generator).to(device)
    positions = torch.cat(
        [torch.arange(30, 30 + query_len), torch.arange(3), torch.arange(7, 8)]
    ).to(device)
    ends = int32([0, query_len, query_len + 3, num_tokens], device)
    computed = int32([30 + query_len // 2, 3, 7], device)
    args = (slots, positions, ends, computed, 1500)
    expected = inputs._drop_rejected_slots_torch(*args)
    assert torch.equal(inputs._drop_rejected_slots_triton(*args), expected)


def blocks(impl, device, max_len):
    return impl(
        torch.tensor([70, 71], device=device),
        torch.tensor([3, 6], device=device),
        3,
        99,
        int32([[5, 6, 7], [1, 2, 3]], device),
        4,
        max_len,
    )


@layouts
def test_a_block_starts_at_the_anchor_and_goes_on_with_masks(impl, device):
    got = blocks(impl, device, 100)
    assert got.input_ids.tolist() == [70, 99, 99, 71, 99, 99]
    assert got.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert got.slot_mapping.tolist() == [23, 24, 25, 10, 11, 12]
    assert got.seq_lens.tolist() == [6, 9]


@layouts
def test_what_has_no_place_is_not_written(impl, device):
    got = blocks(impl, device, 5)
    assert got.positions.tolist() == [3, 4, 0, 0, 0, 0]
    assert got.slot_mapping.tolist() == [23, 24, -1, -1, -1, -1]
    assert got.seq_lens.tolist() == [5, 5]


@pytest.mark.parametrize("num_slots", [1, 3, 4, 9])
@pytest.mark.parametrize("num_reqs", [1, 5])
def test_the_kernel_lays_out_blocks_as_its_twin_does(num_reqs, num_slots, device):
    generator = torch.Generator().manual_seed(num_slots)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator).to(device)

    table = draw(500, num_reqs, 6).to(torch.int32)
    args = (draw(1000, num_reqs), draw(20, num_reqs), num_slots, 99, table, 4, 22)
    expected = inputs._lay_out_blocks_torch(*args)
    got = inputs._lay_out_blocks_triton(*args)
    for field in fields(inputs.BlockInputs):
        assert torch.equal(getattr(got, field.name), getattr(expected, field.name))
