"""One step's inputs, built once from the persistent rows and then only read."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.batch_layout import BatchLayout, find_owners


@dataclass(frozen=True)
class InputBatch:
    """A step, in batch order.

    Args:
        req_ids: batch_idx -> request.
        idx_mapping_np: [num_reqs] int32, batch_idx -> req_state_idx, host.
        idx_mapping: the same on the device.
        layout: token and logit rows of the requests.
        max_seq_len: upper bound of seq_lens, host.
        num_computed_tokens: of each request before the step; an upper bound under
            speculation.
        block_table: [num_reqs, num_blocks] int32, of as many blocks as are needed.
        slot_mapping: [num_tokens] int64, where the tokens are cached.
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64, absolute.
        seq_lens: [num_reqs] int32, tokens in the cache after the step.
        logits_indices: [num_logits] int64, logit row -> token row.
        expanded_idx_mapping: [num_logits] int32, logit row -> req_state_idx.
        expanded_local_pos: [num_logits] int32, place of the row within its request.
        sample_positions: [num_logits] int64, absolute position of the token that the
            row's logits are for.
    """

    req_ids: list[str]
    idx_mapping_np: np.ndarray
    idx_mapping: torch.Tensor
    layout: BatchLayout
    max_seq_len: int
    num_computed_tokens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    sample_positions: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.req_ids)

    def take_logit_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return those of the token rows [num_tokens, ...] that have logits."""
        # All of them, unless a prompt is computed.
        if self.layout.num_logits == self.layout.num_tokens:
            return values
        return values[self.logits_indices]


def lay_out_rows(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    layout: BatchLayout,
) -> tuple[torch.Tensor, ...]:
    """Lay out the rows of a step: its tokens, and where their logits belong.

    The tokens that each request computes next are known ones, then drafts. Its logit
    rows are its last token rows.

    Args:
        all_token_ids: [max_num_reqs, max_model_len] int32.
        total_len: [max_num_reqs] int32, known tokens.
        draft_tokens: [max_num_reqs, num_speculative_tokens] int64.
        num_computed_tokens: [max_num_reqs] int32.
        idx_mapping: [num_reqs] int32.
        layout: of the step.

    Returns:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        seq_lens: [num_reqs] int32.
        logits_indices: [num_logits] int64.
        expanded_idx_mapping: [num_logits] int32.
        expanded_local_pos: [num_logits] int32.
        sample_positions: [num_logits] int64.
    """
    rows = all_token_ids, total_len, draft_tokens, num_computed_tokens, idx_mapping
    tokens = layout.query_start_loc, layout.num_tokens
    gather, expand = _gather_inputs_torch, _expand_logit_rows_torch
    if idx_mapping.is_cuda:
        gather, expand = _gather_inputs_triton, _expand_logit_rows_triton
    input_ids, positions, seq_lens = gather(*rows, *tokens)
    return input_ids, positions, seq_lens, *expand(layout, idx_mapping, positions)


def _gather_inputs_torch(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_computed = num_computed_tokens[idx_mapping]
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    batch_idx = find_owners(query_start_loc[1:], num_tokens)
    # position = token row + (computed tokens - first token row of the request)
    shift = (num_computed - query_start_loc[:-1]).to(torch.int64)
    positions = torch.arange(num_tokens, device=idx_mapping.device) + shift[batch_idx]
    rows = idx_mapping[batch_idx]
    max_draft = draft_tokens.shape[1] - 1
    if max_draft < 0:
        input_ids = all_token_ids[rows, positions].to(torch.int64)
        return input_ids, positions, num_computed + query_lens
    draft_idx = positions - total_len[rows]
    known = all_token_ids[rows, torch.where(draft_idx < 0, positions, 0)]
    drafts = draft_tokens[rows, draft_idx.clamp(0, max_draft)]
    input_ids = torch.where(draft_idx < 0, known.to(torch.int64), drafts)
    return input_ids, positions, num_computed + query_lens


def _gather_inputs_triton(
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = idx_mapping.device
    num_reqs = idx_mapping.shape[0]
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
    _gather_inputs_kernel[(num_reqs,)](
        all_token_ids,
        all_token_ids.stride(0),
        total_len,
        draft_tokens,
        draft_tokens.shape[1],
        num_computed_tokens,
        idx_mapping,
        query_start_loc,
        input_ids,
        positions,
        seq_lens,
        BLOCK_SIZE=1024,
    )
    return input_ids, positions, seq_lens


def _expand_logit_rows_torch(
    layout: BatchLayout, idx_mapping: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    cu_num_logits, num_logits = layout.cu_num_logits, layout.num_logits
    batch_idx = find_owners(cu_num_logits[1:], num_logits)
    rows = torch.arange(num_logits, dtype=torch.int32, device=idx_mapping.device)
    local_pos = rows - cu_num_logits[batch_idx]
    from_the_end = cu_num_logits[batch_idx + 1] - rows
    logits_indices = (layout.query_start_loc[batch_idx + 1] - from_the_end).long()
    return (
        logits_indices,
        idx_mapping[batch_idx],
        local_pos,
        positions[logits_indices] + 1,
    )


def _expand_logit_rows_triton(
    layout: BatchLayout, idx_mapping: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    device, num_logits = idx_mapping.device, layout.num_logits
    logits_indices = torch.empty(num_logits, dtype=torch.int64, device=device)
    expanded_idx_mapping = torch.empty(num_logits, dtype=torch.int32, device=device)
    local_pos = torch.empty(num_logits, dtype=torch.int32, device=device)
    sample_positions = torch.empty(num_logits, dtype=torch.int64, device=device)
    max_rows = int(np.diff(layout.cu_num_logits_np).max(initial=1))
    _expand_logit_rows_kernel[(layout.num_reqs,)](
        layout.cu_num_logits,
        layout.query_start_loc,
        idx_mapping,
        positions,
        logits_indices,
        expanded_idx_mapping,
        local_pos,
        sample_positions,
        BLOCK_SIZE=triton.next_power_of_2(max_rows),
    )
    return logits_indices, expanded_idx_mapping, local_pos, sample_positions


def post_update(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    layout: BatchLayout,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Write a step's samples into the rows and advance their lengths.

    Args:
        sampled_token_ids: [num_reqs, width] int64; -1 where a row had no token to
            choose. Its request is about to end, and token 0 stands there until then:
            a drafter takes what it reads for an index.
        num_sampled: [num_reqs] int32, at most the request's logit rows.
        layout: of the step.
        idx_mapping: [num_reqs] int32.
        all_token_ids: [max_num_reqs, max_model_len] int32, changed in place.
        total_len: [max_num_reqs] int32, changed in place.
        num_computed_tokens: [max_num_reqs] int32, changed in place; rejected drafts
            are not computed tokens.
    """
    rows = idx_mapping, all_token_ids, total_len, num_computed_tokens
    if idx_mapping.is_cuda:
        _post_update_triton(sampled_token_ids, num_sampled, layout, *rows)
    else:
        _post_update_torch(sampled_token_ids, num_sampled, layout, *rows)


def _post_update_torch(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    layout: BatchLayout,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    rows = idx_mapping.long()
    width = sampled_token_ids.shape[1]
    columns = torch.arange(width, device=rows.device)
    targets = total_len[rows].long().unsqueeze(1) + columns
    is_written = (columns < num_sampled.unsqueeze(1)) & (
        targets < all_token_ids.shape[1]
    )
    owners = rows.unsqueeze(1).expand_as(targets)
    tokens = sampled_token_ids[is_written].clamp(min=0).to(all_token_ids.dtype)
    all_token_ids[owners[is_written], targets[is_written]] = tokens
    num_rows = layout.cu_num_logits[1:] - layout.cu_num_logits[:-1]
    query_lens = layout.query_start_loc[1:] - layout.query_start_loc[:-1]
    total_len[rows] += num_sampled
    num_computed_tokens[rows] += query_lens - (num_rows - num_sampled)


def _post_update_triton(
    sampled_token_ids: torch.Tensor,
    num_sampled: torch.Tensor,
    layout: BatchLayout,
    idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    _post_update_kernel[(layout.num_reqs,)](
        sampled_token_ids,
        sampled_token_ids.stride(0),
        num_sampled,
        layout.cu_num_logits,
        layout.query_start_loc,
        idx_mapping,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        total_len,
        num_computed_tokens,
        BLOCK_SIZE=triton.next_power_of_2(sampled_token_ids.shape[1]),
    )


@triton.jit
def _gather_inputs_kernel(
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    total_len_ptr,  # [max_num_reqs]
    draft_tokens_ptr,  # [max_num_reqs, num_speculative_tokens]
    num_speculative_tokens,
    num_computed_tokens_ptr,  # [max_num_reqs]
    idx_mapping_ptr,  # [num_reqs]
    query_start_loc_ptr,  # [num_reqs + 1]
    input_ids_ptr,  # [num_tokens]
    positions_ptr,  # [num_tokens]
    seq_lens_ptr,  # [num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx)
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    num_computed = tl.load(num_computed_tokens_ptr + req_state_idx)
    tl.store(seq_lens_ptr + batch_idx, num_computed + end - start)
    row_ptr = all_token_ids_ptr + req_state_idx * all_token_ids_stride
    total_len = tl.load(total_len_ptr + req_state_idx)
    draft_row_ptr = draft_tokens_ptr + req_state_idx * num_speculative_tokens
    for first in range(0, end - start, BLOCK_SIZE):
        local = first + tl.arange(0, BLOCK_SIZE)
        mask = local < end - start
        position = num_computed + local
        draft_idx = position - total_len
        known = tl.load(row_ptr + position, mask=mask & (draft_idx < 0), other=0)
        is_draft = mask & (draft_idx >= 0) & (draft_idx < num_speculative_tokens)
        draft = tl.load(draft_row_ptr + draft_idx, mask=is_draft, other=0)
        token = tl.where(draft_idx < 0, known.to(tl.int64), draft)
        tl.store(input_ids_ptr + start + local, token, mask=mask)
        tl.store(positions_ptr + start + local, position.to(tl.int64), mask=mask)


@triton.jit
def _expand_logit_rows_kernel(
    cu_num_logits_ptr,  # [num_reqs + 1]
    query_start_loc_ptr,  # [num_reqs + 1]
    idx_mapping_ptr,  # [num_reqs]
    positions_ptr,  # [num_tokens]
    logits_indices_ptr,  # [num_logits]
    expanded_idx_mapping_ptr,  # [num_logits]
    local_pos_ptr,  # [num_logits]
    sample_positions_ptr,  # [num_logits]
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0)
    start = tl.load(cu_num_logits_ptr + batch_idx)
    num_rows = tl.load(cu_num_logits_ptr + batch_idx + 1) - start
    query_end = tl.load(query_start_loc_ptr + batch_idx + 1)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx)
    local_pos = tl.arange(0, BLOCK_SIZE)
    mask = local_pos < num_rows
    token_idx = query_end - num_rows + local_pos
    position = tl.load(positions_ptr + token_idx, mask=mask, other=0)
    logit_idx = start + local_pos
    tl.store(logits_indices_ptr + logit_idx, token_idx.to(tl.int64), mask=mask)
    owner = tl.zeros((BLOCK_SIZE,), tl.int32) + req_state_idx
    tl.store(expanded_idx_mapping_ptr + logit_idx, owner, mask=mask)
    tl.store(local_pos_ptr + logit_idx, local_pos, mask=mask)
    tl.store(sample_positions_ptr + logit_idx, position + 1, mask=mask)


@triton.jit
def _post_update_kernel(
    sampled_token_ids_ptr,  # [num_reqs, width]
    sampled_token_ids_stride,
    num_sampled_ptr,  # [num_reqs]
    cu_num_logits_ptr,  # [num_reqs + 1]
    query_start_loc_ptr,  # [num_reqs + 1]
    idx_mapping_ptr,  # [num_reqs]
    all_token_ids_ptr,  # [max_num_reqs, max_model_len]
    all_token_ids_stride,
    max_model_len,
    total_len_ptr,  # [max_num_reqs]
    num_computed_tokens_ptr,  # [max_num_reqs]
    BLOCK_SIZE: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + batch_idx)
    num_rows = tl.load(cu_num_logits_ptr + batch_idx + 1) - tl.load(
        cu_num_logits_ptr + batch_idx
    )
    query_len = tl.load(query_start_loc_ptr + batch_idx + 1) - tl.load(
        query_start_loc_ptr + batch_idx
    )
    total_len = tl.load(total_len_ptr + req_state_idx)
    column = tl.arange(0, BLOCK_SIZE)
    mask = (column < num_sampled) & (total_len + column < max_model_len)
    token = tl.load(
        sampled_token_ids_ptr + batch_idx * sampled_token_ids_stride + column,
        mask=mask,
        other=0,
    )
    row_ptr = all_token_ids_ptr + req_state_idx * all_token_ids_stride
    token = tl.maximum(token, 0).to(tl.int32)
    tl.store(row_ptr + total_len + column, token, mask=mask)
    tl.store(total_len_ptr + req_state_idx, total_len + num_sampled)
    num_computed = tl.load(num_computed_tokens_ptr + req_state_idx)
    num_computed += query_len - (num_rows - num_sampled)
    tl.store(num_computed_tokens_ptr + req_state_idx, num_computed)
