"""Prompt lookup: what followed the last tokens when they stood there before.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

import torch

from vllm.triton_utils import tl, triton

# Tokens of agreement that are counted: longer ones say no more.
MAX_MATCH_LEN = 32


def propose_ngram(
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    max_len: int,
    lookup_min: int,
    lookup_max: int,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the latest earlier place of the longest suffix, and copy what followed.

    Args:
        token_ids: [max_num_reqs, max_model_len] int32, by request row.
        total_len: [max_num_reqs] int32, known tokens of a row.
        idx_mapping: [num_reqs] int32, batch_idx -> row.
        max_len: tokens of a row that are looked at, host; a bound of total_len over
            the requests that have sampled.
        lookup_min: shortest suffix that counts.
        lookup_max: longest suffix that is tried.
        num_speculative_tokens: drafts at the most.

    Returns:
        draft_token_ids: [num_reqs, num_speculative_tokens] int64, -1 past num_drafts.
        num_drafts: [num_reqs] int32.
        match_len: [num_reqs] int32, how many tokens before the copied ones agree with
            the last ones, also beyond `lookup_max`, up to MAX_MATCH_LEN; 0 for no
            match.
    """
    impl = _propose_ngram_triton if token_ids.is_cuda else _propose_ngram_torch
    return impl(
        token_ids,
        total_len,
        idx_mapping,
        max_len,
        lookup_min,
        lookup_max,
        num_speculative_tokens,
    )


def _propose_ngram_torch(
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    max_len: int,
    lookup_min: int,
    lookup_max: int,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = idx_mapping.long()
    tokens = token_ids[rows, :max_len]
    lengths = total_len[rows].long().clamp(max=max_len).unsqueeze(1)
    ends = torch.arange(max_len, device=rows.device).unsqueeze(0)
    # length_at[r, e]: how many tokens before and at place e agree with the last ones.
    is_equal = torch.ones_like(tokens, dtype=torch.bool)
    length_at = torch.zeros_like(tokens)
    for back in range(min(lookup_max, max_len)):
        last = tokens.gather(1, (lengths - 1 - back).clamp(min=0))
        shifted = torch.full_like(tokens, -1)
        shifted[:, back:] = tokens[:, : max_len - back]
        is_equal &= (shifted == last) & (lengths > back)
        length_at += is_equal
    # Something must follow the place, so the suffix itself is none.
    is_match = (length_at >= lookup_min) & (ends < lengths - 1)
    score = torch.where(is_match, length_at.long() * max_len + ends, -1)
    best, _ = score.max(dim=1, keepdim=True)
    first = torch.where(best >= 0, best % max_len + 1, lengths)
    places = first + torch.arange(num_speculative_tokens, device=rows.device)
    is_draft = places < lengths
    drafts = tokens.gather(1, places.clamp(max=max_len - 1)).long()
    drafts = drafts.masked_fill(~is_draft, -1)
    num_drafts = is_draft.sum(dim=1, dtype=torch.int32)
    distances = 1 + torch.arange(MAX_MATCH_LEN, device=rows.device)
    before = tokens.gather(1, (first - distances).clamp(min=0))
    last = tokens.gather(1, (lengths - distances).clamp(min=0))
    is_agreed = (before == last) & (distances <= first) & (best >= 0)
    return drafts, num_drafts, is_agreed.cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def _propose_ngram_triton(
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    max_len: int,
    lookup_min: int,
    lookup_max: int,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_reqs, device = len(idx_mapping), token_ids.device
    drafts = torch.empty(
        (num_reqs, num_speculative_tokens), dtype=torch.int64, device=device
    )
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=device)
    match_len = torch.empty(num_reqs, dtype=torch.int32, device=device)
    _propose_ngram_kernel[(num_reqs,)](
        token_ids,
        token_ids.stride(0),
        total_len,
        idx_mapping,
        drafts,
        num_drafts,
        match_len,
        max_len,
        lookup_min,
        num_speculative_tokens,
        LOOKUP_MAX=lookup_max,
        MATCH_BLOCK=MAX_MATCH_LEN,
        BLOCK_SIZE=1024,
        DRAFT_BLOCK=triton.next_power_of_2(num_speculative_tokens),
    )
    return drafts, num_drafts, match_len


@triton.jit
def _propose_ngram_kernel(
    token_ids_ptr,  # [max_num_reqs, max_model_len]
    token_ids_stride,
    total_len_ptr,  # [max_num_reqs]
    idx_mapping_ptr,  # [num_reqs]
    drafts_ptr,  # [num_reqs, num_speculative_tokens]
    num_drafts_ptr,  # [num_reqs]
    match_len_ptr,  # [num_reqs]
    max_len,
    lookup_min,
    num_speculative_tokens,
    LOOKUP_MAX: tl.constexpr,
    MATCH_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    length = tl.minimum(tl.load(total_len_ptr + req_state_idx), max_len)
    row_ptr = token_ids_ptr + req_state_idx * token_ids_stride

    # (length of the match, its end) in one number: longer wins, then later.
    best = tl.full((), -1, tl.int64)
    for start in range(0, length - 1, BLOCK_SIZE):
        end = start + tl.arange(0, BLOCK_SIZE)
        is_equal = end < length - 1
        match_len = tl.zeros((BLOCK_SIZE,), tl.int64)
        for back in tl.static_range(LOOKUP_MAX):
            last = tl.load(row_ptr + length - 1 - back, mask=back < length, other=-1)
            token = tl.load(
                row_ptr + end - back, mask=is_equal & (end >= back), other=-2
            )
            is_equal = is_equal & (token == last)
            match_len += is_equal.to(tl.int64)
        score = tl.where(match_len >= lookup_min, match_len * 2147483648 + end, -1)
        best = tl.maximum(best, tl.max(score, axis=0))

    first = tl.where(best >= 0, best % 2147483648 + 1, length)
    column = tl.arange(0, DRAFT_BLOCK)
    is_draft = (first + column < length) & (column < num_speculative_tokens)
    draft = tl.load(row_ptr + first + column, mask=is_draft, other=-1)
    tl.store(
        drafts_ptr + batch_idx * num_speculative_tokens + column,
        draft.to(tl.int64),
        mask=column < num_speculative_tokens,
    )
    tl.store(num_drafts_ptr + batch_idx, tl.sum(is_draft.to(tl.int32), axis=0))

    back = tl.arange(0, MATCH_BLOCK)
    # Without a match nothing is compared.
    has_token = back < tl.where(best >= 0, first, 0)
    before = tl.load(row_ptr + first - 1 - back, mask=has_token, other=-1)
    last = tl.load(row_ptr + length - 1 - back, mask=has_token, other=-2)
    first_other = tl.min(tl.where(before == last, MATCH_BLOCK, back), axis=0)
    tl.store(match_len_ptr + batch_idx, first_other)
