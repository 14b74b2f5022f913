import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.verified_layout import (
    _add_and_sum_torch,
    _add_and_sum_triton,
    make_verified_layout,
)

# 3 drafts, 2, none, and a chunk of a prompt that samples nothing.
STEP = ScheduledStep(
    idx_mapping_np=np.array([4, 0, 2, 1], dtype=np.int32),
    num_tokens_np=np.array([4, 3, 1, 9], dtype=np.int32),
    num_drafts_np=np.array([3, 2, 0, 0], dtype=np.int32),
    is_sampling_np=np.array([True, True, True, False]),
    num_bonus_tokens=1,
)


@pytest.mark.parametrize(
    ("admitted", "rows", "tokens"),
    [
        ([3, 2, 0, 0], [0, 4, 7, 8, 8], [0, 4, 7, 8, 17]),
        ([2, 0, 0, 0], [0, 3, 4, 5, 5], [0, 3, 4, 5, 14]),
        ([0, 0, 0, 0], [0, 1, 2, 3, 3], [0, 1, 2, 3, 12]),
    ],
    ids=["all", "some", "none"],
)
def test_both_layouts_are_right_in_every_regime(admitted, rows, tokens, device):
    layout = make_verified_layout(
        STEP,
        sum(admitted),
        torch.tensor(admitted, dtype=torch.int32, device=device),
    )
    assert layout.cu_num_logits.tolist() == rows
    assert layout.query_start_loc.tolist() == tokens
    assert (layout.num_logits, layout.num_tokens) == (rows[-1], tokens[-1])
    assert layout.cu_num_logits_np.tolist() == [0, 4, 7, 8, 8]
    assert layout.num_scheduled_drafts == 5
    assert layout.is_exact_on_host == (sum(admitted) in (0, 5))
    for sums in (layout.cu_num_logits, layout.query_start_loc):
        assert sums.dtype == torch.int32


def test_a_step_without_drafts_is_exact(device):
    step = ScheduledStep(
        STEP.idx_mapping_np[2:],
        STEP.num_tokens_np[2:],
        STEP.num_drafts_np[2:],
        STEP.is_sampling_np[2:],
        1,
    )
    none = torch.zeros(2, dtype=torch.int32, device=device)
    layout = make_verified_layout(step, 0, none)
    assert layout.num_draft_tokens_per_req is None
    assert layout.is_exact_on_host
    assert layout.cu_num_logits.tolist() == [0, 1, 1]
    assert layout.query_start_loc.tolist() == [0, 1, 10]


@pytest.mark.parametrize("num_reqs", [1, 1023, 1024, 2049])
def test_kernel_matches_reference(num_reqs, device):
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (2, num_reqs), generator=generator).int().to(device)
    admitted = torch.randint(0, 8, (num_reqs,), generator=generator).int().to(device)
    expected = _add_and_sum_torch(counts, admitted)
    actual = _add_and_sum_triton(counts, admitted)
    for sums, wanted in zip(actual, expected, strict=True):
        assert torch.equal(sums, wanted)
