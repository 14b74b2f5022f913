import torch

from vllm.v1.worker.gpu.spec_decode.dspark.inputs import (
    drop_rejected_slots,
    lay_out_blocks,
)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def drop(device, max_len):
    # Five tokens of a request that now has 8 computed, then two of one with 2.
    return drop_rejected_slots(
        torch.tensor([26, 27, 28, 29, 30, 4, 5], device=device),
        torch.tensor([5, 6, 7, 8, 9, 0, 1], device=device),
        int32([0, 5, 7], device),
        int32([8, 2], device),
        max_len,
    ).tolist()


def test_rejected_drafts_are_no_context(device):
    assert drop(device, 100) == [26, 27, 28, -1, -1, 4, 5]


def test_context_ends_where_the_drafters_does(device):
    assert drop(device, 7) == [26, 27, -1, -1, -1, 4, 5]


def blocks(device, max_len):
    return lay_out_blocks(
        torch.tensor([70, 71], device=device),
        torch.tensor([3, 6], device=device),
        3,
        99,
        int32([[5, 6, 7], [1, 2, 3]], device),
        4,
        max_len,
    )


def test_a_block_starts_at_the_anchor_and_goes_on_with_masks(device):
    got = blocks(device, 100)
    assert got.input_ids.tolist() == [70, 99, 99, 71, 99, 99]
    assert got.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert got.slot_mapping.tolist() == [23, 24, 25, 10, 11, 12]
    assert got.seq_lens.tolist() == [6, 9]


def test_what_has_no_place_is_not_written(device):
    got = blocks(device, 5)
    assert got.positions.tolist() == [3, 4, 0, 0, 0, 0]
    assert got.slot_mapping.tolist() == [23, 24, -1, -1, -1, -1]
    assert got.seq_lens.tolist() == [5, 5]
