import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.batch_layout import (
    BatchLayout,
    InexactLayoutError,
    find_owners,
    prefix_sum,
)

# Request 0 has 2 drafts, request 1 has 3, request 2 is a prefill chunk that samples
# nothing, request 3 has none and samples.
DRAFTS = np.array([2, 3, 0, 0], dtype=np.int32)
NUM_TOKENS = np.array([3, 4, 8, 1], dtype=np.int32)
NUM_ROWS = np.array([3, 4, 0, 1], dtype=np.int32)


def make_layout(draft_budget: int, admitted: list[int]) -> BatchLayout:
    rows = np.where(NUM_ROWS > 0, np.array(admitted) + 1, 0)
    trimmed = DRAFTS - np.array(admitted)
    return BatchLayout(
        cu_num_logits_np=prefix_sum(NUM_ROWS),
        cu_num_logits=torch.from_numpy(prefix_sum(rows)),
        query_start_loc=torch.from_numpy(prefix_sum(NUM_TOKENS - trimmed)),
        num_scheduled_tokens_np=NUM_TOKENS,
        num_draft_tokens_per_req=DRAFTS,
        num_bonus_tokens=1,
        draft_budget=draft_budget,
    )


@pytest.mark.parametrize(
    ("budget", "admitted", "num_logits", "num_tokens"),
    [(5, [2, 3, 0, 0], 8, 16), (3, [1, 2, 0, 0], 6, 14), (0, [0, 0, 0, 0], 3, 11)],
    ids=["all", "some", "none"],
)
def test_totals_are_exact_in_every_budget_regime(
    budget, admitted, num_logits, num_tokens
):
    layout = make_layout(budget, admitted)
    assert (layout.num_logits, layout.num_tokens) == (num_logits, num_tokens)
    assert layout.num_logits == int(layout.cu_num_logits[-1])
    assert layout.num_tokens == int(layout.query_start_loc[-1])


@pytest.mark.parametrize(("budget", "admitted"), [(5, [2, 3, 0, 0]), (0, [0] * 4)])
def test_the_host_knows_the_split_when_all_or_none_are_verified(budget, admitted):
    layout = make_layout(budget, admitted)
    assert layout.is_exact_on_host
    assert np.array_equal(
        layout.verified_cu_num_logits_np, layout.cu_num_logits.numpy()
    )


def test_asking_for_host_offsets_that_only_the_device_knows_raises():
    layout = make_layout(3, [1, 2, 0, 0])
    assert not layout.is_exact_on_host
    with pytest.raises(InexactLayoutError, match="3 of 5 drafts"):
        _ = layout.verified_cu_num_logits_np


@pytest.mark.parametrize(("budget", "admitted"), [(3, [1, 2, 0, 0]), (0, [0] * 4)])
def test_the_scheduled_layout_does_not_change_with_the_budget(budget, admitted):
    layout = make_layout(budget, admitted)
    assert layout.cu_num_logits_np.tolist() == [0, 3, 7, 7, 8]
    assert layout.max_num_logits == 8


def test_one_row_per_request_is_told_from_as_many_rows_as_requests():
    # Two rows and none: as many rows as requests, yet row 1 is not request 1's.
    cu = np.array([0, 2, 2], dtype=np.int32)
    layout = BatchLayout(
        cu,
        torch.from_numpy(cu),
        torch.tensor([0, 2, 9], dtype=torch.int32),
        np.array([2, 7], dtype=np.int32),
        np.array([1, 0], dtype=np.int32),
        1,
        1,
    )
    assert layout.num_logits == layout.num_reqs
    assert not layout.has_one_row_per_req


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_belong_to_those_who_have_some(dtype, device):
    counts = torch.tensor([0, 2, 0, 0, 3, 1, 0], dtype=dtype, device=device)
    ends = counts.cumsum(0).to(dtype)
    assert find_owners(ends, 6).tolist() == [1, 1, 4, 4, 4, 5]
    assert find_owners(ends[:1], 0).tolist() == []
