import pytest
import torch

from vllm.v1.worker.gpu import block_table as bt

all_forms = pytest.mark.parametrize(
    "impl",
    [
        bt._compute_slot_mapping_torch,
        bt._compute_slot_mapping_triton,
        bt.compute_slot_mapping,
    ],
    ids=["torch", "triton", "picked"],
)


@all_forms
def test_a_slot_is_block_times_size_plus_offset(impl, device):
    blocks = torch.tensor([[7, 2], [4, 9]], dtype=torch.int32, device=device)
    query_start_loc = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 4, 5, 0], device=device)
    slots = impl(blocks, query_start_loc, positions, 4)
    assert slots.tolist() == [31, 8, 9, 16]


def test_appended_blocks_follow_the_first_ones(device):
    table = bt.BlockTable(3, 64, 16, device)
    table.set_block_ids(1, [5, 6])
    table.append_block_ids(1, [7])
    table.append_block_ids(1, [])
    table.apply_staged_writes()
    row = torch.tensor([1], dtype=torch.int32, device=device)
    assert table.gather(row, 48).tolist() == [[5, 6, 7]]


def test_a_new_request_overwrites_the_row_of_the_last_one(device):
    table = bt.BlockTable(2, 64, 16, device)
    table.set_block_ids(0, [5, 6, 7])
    table.apply_staged_writes()
    table.set_block_ids(0, [8])
    table.append_block_ids(0, [9])
    table.apply_staged_writes()
    row = torch.tensor([0], dtype=torch.int32, device=device)
    assert table.gather(row, 17).tolist() == [[8, 9]]


def test_a_gathered_table_is_as_wide_as_the_longest_sequence(device):
    table = bt.BlockTable(2, 64, 16, device)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
    assert [table.gather(rows, n).shape[1] for n in (1, 16, 17, 64)] == [1, 1, 2, 4]


def test_no_more_is_gathered_than_a_row_holds(device):
    table = bt.BlockTable(2, 32, 16, device)
    table.set_block_ids(1, [5, 6])
    table.apply_staged_writes()
    row = torch.tensor([1], dtype=torch.int32, device=device)
    assert table.gather(row, 33).tolist() == [[5, 6]]
