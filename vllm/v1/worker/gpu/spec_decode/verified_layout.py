"""From a plan to the layout of its step: where the rows of each request stand."""

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import BatchLayout, ScheduledStep, prefix_sum
from vllm.v1.worker.gpu.buffer_utils import to_device


def make_verified_layout(
    step: ScheduledStep, draft_budget: int, admitted: torch.Tensor
) -> BatchLayout:
    """Join what was scheduled with what is verified.

    Args:
        step: as it was scheduled.
        draft_budget: drafts that are verified, over all requests.
        admitted: [num_reqs] int32, on the device: how many leading drafts of each.

    Returns:
        The very same layout for a budget that alone says what is admitted.
    """
    known = step.settled_layouts
    if draft_budget in known:
        return known[draft_budget]
    cu_num_logits, query_start_loc = _compute_offsets(step, draft_budget, admitted)
    layout = BatchLayout(
        cu_num_logits_np=prefix_sum(step.num_bonus_rows_np + step.num_drafts_np),
        cu_num_logits=cu_num_logits,
        query_start_loc=query_start_loc,
        num_scheduled_tokens_np=step.num_tokens_np,
        num_draft_tokens_per_req=step.num_drafts_np if step.num_drafts else None,
        num_bonus_tokens=step.num_bonus_tokens,
        draft_budget=draft_budget,
    )
    if step.settle(draft_budget) is not None:
        known[draft_budget] = layout
    return layout


def _compute_offsets(
    step: ScheduledStep, draft_budget: int, admitted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prefix sums of logit rows and of tokens.

    Twin: _add_and_sum_torch.
    """
    device = admitted.device
    # Logit rows and tokens beside the drafts.
    rows_np, tokens_np = step.num_bonus_rows_np, step.num_tokens_np - step.num_drafts_np
    settled = step.settle(draft_budget)
    if settled is not None:
        # The host knows the split itself.
        return (
            to_device(prefix_sum(rows_np + settled), device),
            to_device(prefix_sum(tokens_np + settled), device),
        )
    counts_np = np.array([rows_np, tokens_np])
    impl = _add_and_sum_torch
    if admitted.is_cuda:
        impl = _add_and_sum_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.add_and_sum
    return impl(to_device(counts_np, device), admitted)


def _add_and_sum_torch(
    counts: torch.Tensor, admitted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the admitted drafts to both rows of counts [2, num_reqs] int32, and sum up.

    Returns:
        [num_reqs + 1] int32 of each row.
    """
    sums = (counts + admitted).cumsum(dim=1, dtype=torch.int32)
    row_sums, token_sums = torch.nn.functional.pad(sums, (1, 0))
    return row_sums, token_sums


def _add_and_sum_triton(
    counts: torch.Tensor, admitted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_reqs = len(admitted)
    # Two tensors: whoever is compiled for the alignment of a pointer finds the same one
    # in every step.
    row_sums = torch.empty(num_reqs + 1, dtype=torch.int32, device=admitted.device)
    token_sums = torch.empty_like(row_sums)
    _add_and_sum_kernel[(1,)](
        counts, admitted, row_sums, token_sums, num_reqs, BLOCK_SIZE=1024
    )
    return row_sums, token_sums


@triton.jit(do_not_specialize=["num_reqs"])
def _add_and_sum_kernel(
    counts_ptr,  # [2, num_reqs]
    admitted_ptr,  # [num_reqs]
    row_sums_ptr,  # [num_reqs + 1]
    token_sums_ptr,  # [num_reqs + 1]
    num_reqs,
    BLOCK_SIZE: tl.constexpr,
):
    # One program.
    tl.store(row_sums_ptr, 0)
    tl.store(token_sums_ptr, 0)
    num_rows = tl.full((), 0, tl.int32)
    num_tokens = tl.full((), 0, tl.int32)
    for first in range(0, num_reqs, BLOCK_SIZE):
        batch_idx = first + tl.arange(0, BLOCK_SIZE)
        mask = batch_idx < num_reqs
        admitted = tl.load(admitted_ptr + batch_idx, mask=mask, other=0)
        rows = tl.load(counts_ptr + batch_idx, mask=mask, other=0)
        tokens = tl.load(counts_ptr + num_reqs + batch_idx, mask=mask, other=0)
        rows += admitted
        tokens += admitted
        row_sums = num_rows + tl.cumsum(rows, axis=0)
        token_sums = num_tokens + tl.cumsum(tokens, axis=0)
        tl.store(row_sums_ptr + 1 + batch_idx, row_sums, mask=mask)
        tl.store(token_sums_ptr + 1 + batch_idx, token_sums, mask=mask)
        num_rows += tl.sum(rows, axis=0)
        num_tokens += tl.sum(tokens, axis=0)
