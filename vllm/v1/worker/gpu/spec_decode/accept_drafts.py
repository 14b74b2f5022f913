"""Whether a drawn draft passes: with probability target / draft, at most 1."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton


def accept_drafts(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    uniform: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> torch.Tensor:
    """Accept the draft of a row if uniform x p_draft < p_target.

    Args:
        target_logits: [num_logits, vocab_size] float32, ready for softmax.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size] float32, what
            the drafts were drawn from; None: a draft was certain, p_draft = 1.
        draft_token_ids: [num_logits] int64, the draft that the row judges; -1: none,
            and nothing is accepted.
        uniform: [num_logits] float32 in [0, 1).
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        expanded_local_pos: [num_logits] int32, place of the row within its request,
            which is the place of its draft among the request's drafts.

    Returns:
        [num_logits] bool.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via
    Speculative Decoding", ICML 2023, Algorithm 1. Twin: _accept_drafts_torch.
    """
    impl = _accept_drafts_torch
    if target_logits.is_cuda:
        impl = _accept_drafts_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.accept_drafts
    return impl(
        target_logits,
        draft_logits,
        draft_token_ids,
        uniform,
        expanded_idx_mapping,
        expanded_local_pos,
    )


def _accept_drafts_torch(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    uniform: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> torch.Tensor:
    rows = (draft_token_ids >= 0).nonzero().squeeze(-1)
    drafts = draft_token_ids[rows].unsqueeze(1)
    target_probs = target_logits[rows].softmax(dim=-1).gather(1, drafts).squeeze(1)
    threshold = uniform[rows]
    if draft_logits is not None:
        proposed = draft_logits[expanded_idx_mapping[rows], expanded_local_pos[rows]]
        draft_probs = proposed.softmax(dim=-1).gather(1, drafts).squeeze(1)
        threshold = threshold * draft_probs
    is_accepted = torch.zeros_like(draft_token_ids, dtype=torch.bool)
    is_accepted[rows] = threshold < target_probs
    return is_accepted


def _accept_drafts_triton(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    uniform: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> torch.Tensor:
    num_logits, vocab_size = target_logits.shape
    is_accepted = torch.empty(num_logits, dtype=torch.bool, device=target_logits.device)
    has_draft_logits = draft_logits is not None
    drafted = target_logits.unsqueeze(0) if draft_logits is None else draft_logits
    _accept_drafts_kernel[(num_logits,)](
        target_logits,
        target_logits.stride(0),
        drafted,
        drafted.stride(0),
        drafted.stride(1),
        draft_token_ids,
        uniform,
        expanded_idx_mapping,
        expanded_local_pos,
        is_accepted,
        vocab_size,
        HAS_DRAFT_LOGITS=has_draft_logits,
        BLOCK_SIZE=2048,
    )
    return is_accepted


@triton.jit
def softmax_stats(row_ptr, vocab_size, BLOCK_SIZE: tl.constexpr):
    """Return a shift and a sum: a probability is exp(logit - shift) / sum.

    All of them are 0 in a row without a choice.
    """
    row_max = float("-inf")
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        block = tl.load(
            row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")
        )
        row_max = tl.maximum(row_max, tl.max(block, axis=0))
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    total = 0.0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        block = tl.load(
            row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")
        )
        total += tl.sum(tl.exp(block - row_max), axis=0)
    return row_max, tl.where(total == 0.0, 1.0, total)


@triton.jit
def _accept_drafts_kernel(
    target_logits_ptr,  # [num_logits, vocab_size]
    target_logits_stride,
    draft_logits_ptr,  # [max_num_reqs, num_speculative_tokens, vocab_size]
    draft_logits_req_stride,
    draft_logits_stride,
    draft_token_ids_ptr,  # [num_logits]
    uniform_ptr,  # [num_logits]
    expanded_idx_mapping_ptr,  # [num_logits]
    expanded_local_pos_ptr,  # [num_logits]
    is_accepted_ptr,  # [num_logits]
    vocab_size,
    HAS_DRAFT_LOGITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row.
    logit_idx = tl.program_id(0).to(tl.int64)
    draft = tl.load(draft_token_ids_ptr + logit_idx)
    if draft < 0:
        tl.store(is_accepted_ptr + logit_idx, False)
        return
    target_ptr = target_logits_ptr + logit_idx * target_logits_stride
    target_max, target_sum = softmax_stats(target_ptr, vocab_size, BLOCK_SIZE)
    target_prob = tl.exp(tl.load(target_ptr + draft) - target_max) / target_sum
    threshold = tl.load(uniform_ptr + logit_idx)
    if HAS_DRAFT_LOGITS:
        req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
        local_pos = tl.load(expanded_local_pos_ptr + logit_idx).to(tl.int64)
        draft_ptr = draft_logits_ptr + req_state_idx * draft_logits_req_stride
        draft_ptr += local_pos * draft_logits_stride
        draft_max, draft_sum = softmax_stats(draft_ptr, vocab_size, BLOCK_SIZE)
        threshold *= tl.exp(tl.load(draft_ptr + draft) - draft_max) / draft_sum
    tl.store(is_accepted_ptr + logit_idx, threshold < target_prob)
