"""Which drafts a budget admits: the likeliest to count, over all requests of a step."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton


def admit_drafts(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_budget: int,
) -> torch.Tensor:
    """Admit the drafts with the highest survivals.

    The survival of a draft is the product of the confidences up to it. Ties go to the
    lower position, then to the lower request. A survival is never above the one before
    it, so what is admitted of a request is a prefix of its drafts, and whether one is
    admitted does not depend on the confidences behind it, which have seen the draft.

    Args:
        confidence_probs: [max_num_reqs, num_speculative_tokens] float32 by request row,
            the probability that a draft is accepted if those before it are. What is out
            of [0, 1] is taken for the next bound, and NaN for 0.
        idx_mapping: [num_reqs] int32.
        num_drafts: [num_reqs] int32, scheduled.
        draft_budget: drafts to admit, at most the sum of num_drafts.

    Returns:
        [num_reqs] int32, at most num_drafts each, draft_budget together.

    Twin: _admit_drafts_torch.
    """
    impl = _admit_drafts_torch
    if idx_mapping.is_cuda:
        impl = _admit_drafts_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.admit_drafts
    return impl(confidence_probs, idx_mapping, num_drafts, draft_budget)


def _admit_drafts_torch(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_budget: int,
) -> torch.Tensor:
    num_reqs, max_drafts = len(idx_mapping), confidence_probs.shape[1]
    confidences = confidence_probs[idx_mapping].nan_to_num(0.0).clamp(0.0, 1.0)
    # A factor of at most 1 cannot raise a product, nor can the rounding.
    survivals = confidences.double().cumprod(dim=1).float()
    positions = torch.arange(max_drafts, device=idx_mapping.device)
    # Behind a request's last draft, less than any survival.
    survivals.masked_fill_(positions >= num_drafts.unsqueeze(1), -1.0)
    # A stable sort of all first drafts, then all second ones, and so on.
    by_position = survivals.t().flatten()
    order = by_position.sort(descending=True, stable=True).indices
    admitted = order[:draft_budget] % num_reqs
    counts = torch.zeros(num_reqs, dtype=torch.int32, device=idx_mapping.device)
    return counts.index_add_(0, admitted, torch.ones_like(admitted, dtype=torch.int32))


def _admit_drafts_triton(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_budget: int,
) -> torch.Tensor:
    num_reqs, max_drafts = len(idx_mapping), confidence_probs.shape[1]
    device = idx_mapping.device
    survivals = torch.empty((num_reqs, max_drafts), device=device)
    _compute_survivals_kernel[(num_reqs,)](
        confidence_probs,
        confidence_probs.stride(0),
        idx_mapping,
        num_drafts,
        survivals,
        max_drafts,
    )
    admitted = torch.empty(num_reqs, dtype=torch.int32, device=device)
    _admit_drafts_kernel[(num_reqs,)](
        survivals,
        num_drafts,
        admitted,
        draft_budget,
        num_reqs,
        max_drafts,
        DRAFT_BLOCK=triton.next_power_of_2(max_drafts),
        BLOCK_SIZE=256,
    )
    return admitted


@triton.jit
def _compute_survivals_kernel(
    confidence_probs_ptr,  # [max_num_reqs, max_drafts]
    confidence_probs_stride,
    idx_mapping_ptr,  # [num_reqs]
    num_drafts_ptr,  # [num_reqs]
    survivals_ptr,  # [num_reqs, max_drafts]
    max_drafts,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    num_drafts = tl.load(num_drafts_ptr + batch_idx)
    row_ptr = confidence_probs_ptr + req_state_idx * confidence_probs_stride
    survival = tl.full((), 1.0, tl.float64)
    for position in range(max_drafts):
        confidence = tl.load(row_ptr + position)
        # False for NaN.
        confidence = tl.where(confidence > 0.0, confidence, 0.0)
        survival *= tl.minimum(confidence, 1.0).to(tl.float64)
        shown = tl.where(position < num_drafts, survival.to(tl.float32), -1.0)
        tl.store(survivals_ptr + batch_idx * max_drafts + position, shown)


# They differ from step to step: no value shall be worth a compilation.
@triton.jit(do_not_specialize=["draft_budget", "num_reqs"])
def _admit_drafts_kernel(
    survivals_ptr,  # [num_reqs, max_drafts]
    num_drafts_ptr,  # [num_reqs]
    admitted_ptr,  # [num_reqs]
    draft_budget,
    num_reqs,
    max_drafts,
    DRAFT_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request: a draft is admitted if fewer than the budget's number
    # of drafts come before it.
    batch_idx = tl.program_id(0)
    num_drafts = tl.load(num_drafts_ptr + batch_idx)
    position = tl.arange(0, DRAFT_BLOCK)
    is_draft = position < num_drafts
    survival = tl.load(
        survivals_ptr + batch_idx * max_drafts + position, mask=is_draft, other=0.0
    )
    num_before = tl.zeros((DRAFT_BLOCK,), tl.int32)
    num_places = num_reqs * max_drafts
    for first in range(0, num_places, BLOCK_SIZE):
        place = first + tl.arange(0, BLOCK_SIZE)
        other = tl.load(
            survivals_ptr + place, mask=place < num_places, other=float("-inf")
        )
        other_position = place % max_drafts
        is_earlier = (other_position[None, :] < position[:, None]) | (
            (other_position[None, :] == position[:, None])
            & ((place // max_drafts)[None, :] < batch_idx)
        )
        is_before = (other[None, :] > survival[:, None]) | (
            (other[None, :] == survival[:, None]) & is_earlier
        )
        num_before += tl.sum(is_before.to(tl.int32), axis=1)
    is_admitted = is_draft & (num_before < draft_budget)
    tl.store(admitted_ptr + batch_idx, tl.sum(is_admitted.to(tl.int32), axis=0))
