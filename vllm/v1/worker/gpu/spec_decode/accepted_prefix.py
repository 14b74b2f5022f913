"""From a verdict on every logit row to the tokens of every request."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton


def take_accepted_prefix(
    is_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    max_rows_per_req: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk each request's rows up to the first one whose draft is not accepted.

    Args:
        is_accepted: [num_logits] bool; the last row of a request has no draft and is
            not accepted.
        token_ids: [num_logits] int64, what the row emits: the draft where it is
            accepted, else the token drawn in its place.
        cu_num_logits: [num_reqs + 1] int32, prefix sum of logit rows per request.
        max_rows_per_req: drafts + bonus rows.

    Returns:
        sampled: [num_reqs, max_rows_per_req] int64, -1 past num_sampled.
        num_sampled: [num_reqs] int32; 0 only for a request without a row.

    Twin: _take_accepted_prefix_torch.
    """
    impl = _take_accepted_prefix_torch
    if is_accepted.is_cuda:
        impl = _take_accepted_prefix_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.take_accepted_prefix
    return impl(is_accepted, token_ids, cu_num_logits, max_rows_per_req)


def _take_accepted_prefix_torch(
    is_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    max_rows_per_req: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.arange(max_rows_per_req, device=is_accepted.device)
    # The row of a column that a request does not have is another's, and not emitted.
    logit_idx = cu_num_logits[:-1].long().unsqueeze(1) + columns
    logit_idx.clamp_(max=len(is_accepted) - 1)
    num_rows = torch.diff(cu_num_logits).unsqueeze(1)
    is_passed = is_accepted[logit_idx] & (columns < num_rows)
    num_accepted = is_passed.cumprod(dim=1).sum(dim=1, keepdim=True)
    is_emitted = (columns <= num_accepted) & (columns < num_rows)
    sampled = token_ids[logit_idx].masked_fill_(~is_emitted, -1)
    return sampled, is_emitted.sum(dim=1, dtype=torch.int32)


def _take_accepted_prefix_triton(
    is_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    max_rows_per_req: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_reqs, device = len(cu_num_logits) - 1, is_accepted.device
    sampled = torch.empty(
        (num_reqs, max_rows_per_req), dtype=torch.int64, device=device
    )
    num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=device)
    _take_accepted_prefix_kernel[(num_reqs,)](
        is_accepted,
        token_ids,
        cu_num_logits,
        sampled,
        num_sampled,
        max_rows_per_req,
        BLOCK_SIZE=triton.next_power_of_2(max_rows_per_req),
    )
    return sampled, num_sampled


@triton.jit
def _take_accepted_prefix_kernel(
    is_accepted_ptr,  # [num_logits]
    token_ids_ptr,  # [num_logits]
    cu_num_logits_ptr,  # [num_reqs + 1]
    sampled_ptr,  # [num_reqs, max_rows_per_req]
    num_sampled_ptr,  # [num_reqs]
    max_rows_per_req,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per request.
    batch_idx = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + batch_idx)
    num_rows = tl.load(cu_num_logits_ptr + batch_idx + 1) - first
    column = tl.arange(0, BLOCK_SIZE)
    mask = column < num_rows
    is_accepted = tl.load(is_accepted_ptr + first + column, mask=mask, other=0)
    first_rejected = tl.min(tl.where(is_accepted == 0, column, BLOCK_SIZE), axis=0)
    num_sampled = tl.minimum(first_rejected + 1, num_rows)
    token_ids = tl.load(token_ids_ptr + first + column, mask=mask, other=-1)
    token_ids = tl.where(column < num_sampled, token_ids, -1)
    tl.store(
        sampled_ptr + batch_idx * max_rows_per_req + column,
        token_ids,
        mask=column < max_rows_per_req,
    )
    tl.store(num_sampled_ptr + batch_idx, num_sampled)
