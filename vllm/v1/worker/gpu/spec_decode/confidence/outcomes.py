"""What became of drafts, counted by their score: drafted, tried and accepted."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.spec_decode.confidence.scale import PARTS_PER_KNOT

NUM_OUTCOMES = 3
DRAFTED, TRIED, ACCEPTED = range(NUM_OUTCOMES)


def count_outcomes(
    counts: torch.Tensor,
    marks: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    num_bonus_tokens: int,
) -> None:
    """Count a step's drafts, and forget their marks, so that each is counted once.

    A draft was tried if it was verified and those before it were accepted: what stands
    behind a rejected or a trimmed draft says nothing about acceptance. A draft between
    two knots counts for both, by its nearness.

    Args:
        counts: [NUM_KINDS, num_speculative_tokens, num_knots, 3] int32, parts of
            drafted, tried and accepted drafts; added to in place.
        marks: [max_num_reqs, num_speculative_tokens] int32, by request row, of the
            drafts of the step, as `read_curves` says; those of the step become -1.
        idx_mapping: [num_reqs] int32, batch_idx -> request row.
        cu_num_logits: [num_reqs + 1] int32, verified rows: drafts and bonus.
        num_sampled: [num_reqs] int32, accepted drafts and one more.
        num_bonus_tokens: rows of a sampling request beside its drafts.

    Twin: _count_outcomes_torch.
    """
    rows = idx_mapping, cu_num_logits, num_sampled, num_bonus_tokens
    if counts.is_cuda:
        _count_outcomes_triton(counts, marks, *rows)
    elif (native := ops.maybe_step_ops()) is not None:
        native.count_outcomes(counts, marks, *rows, PARTS_PER_KNOT)
    else:
        _count_outcomes_torch(counts, marks, *rows)


def _count_outcomes_torch(
    counts: torch.Tensor,
    marks: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    num_bonus_tokens: int,
) -> None:
    rows = idx_mapping.long()
    num_accepted = num_sampled - num_bonus_tokens
    num_admitted = torch.diff(cu_num_logits) - num_bonus_tokens
    num_tried = torch.minimum(num_accepted + 1, num_admitted)
    # More drafts than there are: all of them were drafted.
    limits = torch.stack((torch.full_like(num_tried, 2**30), num_tried, num_accepted))
    steps = torch.arange(marks.shape[1], dtype=torch.int32, device=marks.device)
    of_step = marks[rows].unsqueeze(2)
    happened = (steps.unsqueeze(1) < limits.T.unsqueeze(1)) & (of_step >= 0)
    happened = happened.to(torch.int32).flatten(0, 1)
    cell, parts = (of_step // PARTS_PER_KNOT).flatten(), of_step % PARTS_PER_KNOT
    above = happened * parts.flatten(0, 1)
    flat = counts.view(-1, NUM_OUTCOMES)
    # What is no draft, and what stands on the last knot, adds nothing there.
    flat.index_add_(0, cell.clamp(min=0), happened * PARTS_PER_KNOT - above)
    flat.index_add_(0, (cell + 1).clamp_(max=len(flat) - 1), above)
    marks[rows] = -1


def _count_outcomes_triton(
    counts: torch.Tensor,
    marks: torch.Tensor,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    num_bonus_tokens: int,
) -> None:
    num_drafts = marks.shape[1]
    _count_outcomes_kernel[(len(idx_mapping),)](
        counts,
        marks,
        idx_mapping,
        cu_num_logits,
        num_sampled,
        num_drafts,
        num_bonus_tokens,
        PARTS=PARTS_PER_KNOT,
        BLOCK_SIZE=triton.next_power_of_2(num_drafts),
    )


@triton.jit
def _add_parts(count_ptr, parts, is_tried, is_accepted, mask):
    # A knot's three counts stand side by side.
    tl.atomic_add(count_ptr, parts, mask=mask)
    tl.atomic_add(count_ptr + 1, parts, mask=mask & is_tried)
    tl.atomic_add(count_ptr + 2, parts, mask=mask & is_accepted)


@triton.jit
def _count_outcomes_kernel(
    counts_ptr,  # [NUM_KINDS, num_speculative_tokens, num_knots, 3]
    marks_ptr,  # [max_num_reqs, num_speculative_tokens]
    idx_mapping_ptr,  # [num_reqs]
    cu_num_logits_ptr,  # [num_reqs + 1]
    num_sampled_ptr,  # [num_reqs]
    num_drafts,
    num_bonus_tokens,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    num_rows = tl.load(cu_num_logits_ptr + batch_idx + 1) - tl.load(
        cu_num_logits_ptr + batch_idx
    )
    num_admitted = num_rows - num_bonus_tokens
    num_accepted = tl.load(num_sampled_ptr + batch_idx) - num_bonus_tokens
    step = tl.arange(0, BLOCK_SIZE)
    mask = step < num_drafts
    mark_ptr = marks_ptr + req_state_idx * num_drafts + step
    mark = tl.load(mark_ptr, mask=mask, other=-1)
    is_draft = mark >= 0
    is_tried = (step <= num_accepted) & (step < num_admitted)
    is_accepted = step < num_accepted
    mark = tl.maximum(mark, 0)
    parts = mark % PARTS
    count_ptr = counts_ptr + mark // PARTS * 3
    _add_parts(count_ptr, PARTS - parts, is_tried, is_accepted, is_draft)
    # What stands on the last knot has none above it.
    has_above = is_draft & (parts > 0)
    _add_parts(count_ptr + 3, parts, is_tried, is_accepted, has_above)
    tl.store(mark_ptr, tl.full((BLOCK_SIZE,), -1, tl.int32), mask=mask)
