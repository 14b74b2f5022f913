"""What a rejected draft leaves: the target's distribution less the draft's."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.spec_decode.accept_drafts import softmax_stats


def write_residual_logits(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    is_rejected: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Replace rejected rows by the logits of norm(max(p_target - p_draft, 0)).

    A row whose residual is empty, because the two distributions are equal up to
    rounding, stays the target's.

    Args:
        target_logits: [num_logits, vocab_size] float32, changed in place.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size] float32; None:
            the draft was certain, and the residual is the target without it.
        draft_token_ids: [num_logits] int64, the draft that the row judges, or -1.
        is_rejected: [num_logits] bool; never set where there is no draft.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        expanded_local_pos: [num_logits] int32, place of the row within its request.

    Source: as `accept_drafts`. Twin: _write_residual_logits_torch.
    """
    if draft_logits is None:
        _remove_drafts(target_logits, draft_token_ids, is_rejected)
        return
    impl = _write_residual_logits_torch
    if target_logits.is_cuda:
        impl = _write_residual_logits_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.write_residual_logits
    impl(
        target_logits,
        draft_logits,
        is_rejected,
        expanded_idx_mapping,
        expanded_local_pos,
    )


def _remove_drafts(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    is_rejected: torch.Tensor,
) -> None:
    # Something is left: the only choice of a row has probability 1 and is not rejected.
    drafts = draft_token_ids.clamp(min=0).unsqueeze(1)
    kept = target_logits.gather(1, drafts)
    kept.masked_fill_(is_rejected.unsqueeze(1), float("-inf"))
    target_logits.scatter_(1, drafts, kept)


def _write_residual_logits_torch(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    is_rejected: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    rows = is_rejected.nonzero().squeeze(-1)
    target = target_logits[rows]
    drafted = draft_logits[expanded_idx_mapping[rows], expanded_local_pos[rows]]
    residual = target.softmax(dim=-1) - drafted.softmax(dim=-1)
    # False for NaN as well.
    has_residual = (residual > 0).any(dim=-1, keepdim=True)
    residual = residual.clamp_(min=0).log_()
    target_logits[rows] = torch.where(has_residual, residual, target)


def _write_residual_logits_triton(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    is_rejected: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    num_logits, vocab_size = target_logits.shape
    _write_residual_logits_kernel[(num_logits,)](
        target_logits,
        target_logits.stride(0),
        draft_logits,
        draft_logits.stride(0),
        draft_logits.stride(1),
        is_rejected,
        expanded_idx_mapping,
        expanded_local_pos,
        vocab_size,
        BLOCK_SIZE=2048,
    )


@triton.jit
def _load_residual(
    target_ptr,
    draft_ptr,
    offsets,
    vocab_size,
    target_max,
    target_sum,
    draft_max,
    draft_sum,
):
    mask = offsets < vocab_size
    target = tl.load(target_ptr + offsets, mask=mask, other=float("-inf"))
    draft = tl.load(draft_ptr + offsets, mask=mask, other=float("-inf"))
    target_prob = tl.exp(target - target_max) / target_sum
    return target_prob - tl.exp(draft - draft_max) / draft_sum


@triton.jit
def _write_residual_logits_kernel(
    target_logits_ptr,  # [num_logits, vocab_size]
    target_logits_stride,
    draft_logits_ptr,  # [max_num_reqs, num_speculative_tokens, vocab_size]
    draft_logits_req_stride,
    draft_logits_stride,
    is_rejected_ptr,  # [num_logits]
    expanded_idx_mapping_ptr,  # [num_logits]
    expanded_local_pos_ptr,  # [num_logits]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row.
    logit_idx = tl.program_id(0).to(tl.int64)
    if tl.load(is_rejected_ptr + logit_idx) == 0:
        return
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    local_pos = tl.load(expanded_local_pos_ptr + logit_idx).to(tl.int64)
    target_ptr = target_logits_ptr + logit_idx * target_logits_stride
    draft_ptr = draft_logits_ptr + req_state_idx * draft_logits_req_stride
    draft_ptr += local_pos * draft_logits_stride
    target_max, target_sum = softmax_stats(target_ptr, vocab_size, BLOCK_SIZE)
    draft_max, draft_sum = softmax_stats(draft_ptr, vocab_size, BLOCK_SIZE)

    # Nothing may be written before it is known that something is left.
    num_left = 0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        residual = _load_residual(
            target_ptr,
            draft_ptr,
            offsets,
            vocab_size,
            target_max,
            target_sum,
            draft_max,
            draft_sum,
        )
        num_left += tl.sum((residual > 0).to(tl.int32), axis=0)
    if num_left == 0:
        return

    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        residual = _load_residual(
            target_ptr,
            draft_ptr,
            offsets,
            vocab_size,
            target_max,
            target_sum,
            draft_max,
            draft_sum,
        )
        is_left = residual > 0
        logit = tl.log(tl.where(is_left, residual, 1.0))
        logit = tl.where(is_left, logit, float("-inf"))
        tl.store(target_ptr + offsets, logit, mask=offsets < vocab_size)
