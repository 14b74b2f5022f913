import numpy as np
import torch

from vllm.v1.worker.gpu.sample.ragged import RaggedRows


def _expand(ragged: RaggedRows, rows: list[int], device: torch.device):
    mapping = torch.tensor(rows, dtype=torch.int32, device=device)
    logit_idx, value_idx = ragged.expand(mapping)
    return logit_idx.tolist(), ragged.values[0][value_idx].tolist()


def test_each_logit_row_finds_its_requests_list(device):
    ragged = RaggedRows(4, (torch.int32,), device)
    ragged.set_row(2, np.array([7, 8, 9]))
    ragged.set_row(0, np.array([5]))
    ragged.apply_staged_writes()
    assert _expand(ragged, [0, 1, 2, 0], device) == ([0, 2, 2, 2, 3], [5, 7, 8, 9, 5])
    assert ragged.max_length == 3


def test_a_cleared_row_is_empty_and_leaves_the_others(device):
    ragged = RaggedRows(3, (torch.int32,), device)
    ragged.set_row(0, np.array([1, 2]))
    ragged.set_row(1, np.array([3]))
    ragged.apply_staged_writes()
    ragged.clear_row(0)
    ragged.apply_staged_writes()
    assert _expand(ragged, [0, 1], device) == ([1], [3])
    ragged.clear_row(1)
    ragged.apply_staged_writes()
    assert _expand(ragged, [0, 1], device) == ([], [])


def test_parallel_arrays_keep_their_types(device):
    ragged = RaggedRows(2, (torch.int32, torch.float32), device)
    ragged.set_row(1, np.array([1], dtype=np.int64), np.array([0.5]))
    ragged.apply_staged_writes()
    assert [values.dtype for values in ragged.values] == [torch.int32, torch.float32]
