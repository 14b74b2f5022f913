import itertools

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.accepted_prefix import (
    _take_accepted_prefix_torch,
    _take_accepted_prefix_triton,
    take_accepted_prefix,
)

all_forms = pytest.mark.parametrize(
    "impl",
    [_take_accepted_prefix_torch, _take_accepted_prefix_triton, take_accepted_prefix],
    ids=["torch", "triton", "picked"],
)


def _walk(impl, verdicts, num_rows, width, device):
    starts = [0]
    for count in num_rows:
        starts.append(starts[-1] + count)
    is_accepted = torch.tensor(verdicts, dtype=torch.bool, device=device)
    token_ids = torch.arange(10, 10 + len(verdicts), device=device)
    cu_num_logits = torch.tensor(starts, dtype=torch.int32, device=device)
    sampled, num_sampled = impl(is_accepted, token_ids, cu_num_logits, width)
    assert sampled.dtype == torch.int64
    assert num_sampled.dtype == torch.int32
    return sampled.tolist(), num_sampled.tolist()


@all_forms
@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([0, 1, 1, 0], [10, -1, -1, -1]),
        ([1, 0, 1, 0], [10, 11, -1, -1]),
        ([1, 1, 0, 0], [10, 11, 12, -1]),
        ([1, 1, 1, 0], [10, 11, 12, 13]),
        ([0, 0, 0, 0], [10, -1, -1, -1]),
    ],
)
def test_a_request_emits_up_to_its_first_rejection(impl, verdicts, expected, device):
    sampled, num_sampled = _walk(impl, verdicts, [4], 4, device)
    assert sampled == [expected]
    assert num_sampled == [4 - expected.count(-1)]


@all_forms
def test_requests_do_not_run_into_each_other(impl, device):
    # No row, all accepted, no draft, trimmed to one draft, no row, rejected at once.
    verdicts = [1, 1, 0, 0, 1, 0, 0, 1, 0]
    sampled, num_sampled = _walk(impl, verdicts, [0, 3, 1, 2, 0, 3], 3, device)
    assert sampled == [
        [-1, -1, -1],
        [10, 11, 12],
        [13, -1, -1],
        [14, 15, -1],
        [-1, -1, -1],
        [16, -1, -1],
    ]
    assert num_sampled == [0, 3, 1, 2, 0, 1]


@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_kernel_matches_reference(width, device):
    torch.manual_seed(0)
    num_rows = torch.randint(0, width + 1, (12,)).tolist()
    num_rows[0] = width
    verdicts = (torch.rand(sum(num_rows)) > 0.3).tolist()
    for end in itertools.accumulate(num_rows):
        verdicts[end - 1] = False
    expected = _walk(_take_accepted_prefix_torch, verdicts, num_rows, width, device)
    for impl in (_take_accepted_prefix_triton, take_accepted_prefix):
        assert _walk(impl, verdicts, num_rows, width, device) == expected
