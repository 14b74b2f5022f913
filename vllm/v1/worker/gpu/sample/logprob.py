"""Log-probabilities, or logits, of the sampled tokens and of the likeliest others."""

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm._cpu_ops_torch import LinearStatistics
from vllm.triton_utils import tl, triton
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.ragged import RaggedRows

# The id of a column that a row does not fill.
PADDING_TOKEN_ID = -1


def compute_topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    *,
    logits_mode: bool = False,
    chosen_token_ids: RaggedRows | None = None,
    expanded_idx_mapping: torch.Tensor | None = None,
) -> LogprobsTensors:
    """Return each row's sampled token and its candidates, with scores and rank.

    The rank of the sampled token is 1 + the number of strictly greater logits.

    Args:
        logits: [num_logits, vocab_size] float32; not changed.
        num_logprobs: candidates beside the sampled token, at most the vocabulary.
        sampled_token_ids: [num_logits] int64; -1 where no token was sampled.
        cu_num_logits: row boundaries of the requests, on the host or on the device. The
            device's are cloned: their buffer is rewritten by the next step.
        logits_mode: the scores are logits instead of log-probabilities.
        chosen_token_ids: candidates that some requests named themselves: they replace
            the likeliest ones; the row's other columns hold PADDING_TOKEN_ID and -inf.
            No list is longer than num_logprobs.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row; needed
            with chosen_token_ids.
    """
    num_candidates = min(num_logprobs, logits.shape[1])
    # A row without a token has no meaning, but must not read outside the vocabulary.
    selected = sampled_token_ids.clamp(min=0)
    token_ids = selected.unsqueeze(1)
    if num_candidates > 0:
        token_ids = torch.cat(
            [token_ids, _likeliest_token_ids(logits, num_candidates)], dim=1
        )
    if chosen_token_ids is not None and num_candidates > 0:
        assert expanded_idx_mapping is not None, "the lists are the requests'"
        place_chosen_token_ids(token_ids, expanded_idx_mapping, chosen_token_ids)
    logsumexp, ranks = logprob_stats(logits, selected)
    scores = logits.gather(1, token_ids.clamp(min=0))
    if not logits_mode:
        scores -= logsumexp.unsqueeze(1)
    if chosen_token_ids is not None:
        scores.masked_fill_(token_ids < 0, float("-inf"))
    return _with_boundaries(token_ids, scores, ranks, cu_num_logits)


def listed_scores(
    statistics: LinearStatistics,
    num_logprobs: int,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    *,
    logits_mode: bool = False,
) -> LogprobsTensors:
    """Return what `compute_topk_scores` does of rows whose token is their argmax.

    Args:
        statistics: of at least one token a row, and at least num_logprobs.
        num_logprobs: candidates beside the token.
        cu_num_logits: as in `compute_topk_scores`.
        logits_mode: as in `compute_topk_scores`.
    """
    ids, products = statistics.ids, statistics.products
    token_ids = torch.cat([ids[:, :1], ids[:, :num_logprobs]], dim=1)
    scores = torch.cat([products[:, :1], products[:, :num_logprobs]], dim=1)
    if not logits_mode:
        scores -= statistics.logsumexp.unsqueeze(1)
    ranks = torch.ones_like(statistics.logsumexp, dtype=torch.int32)
    return _with_boundaries(token_ids, scores, ranks, cu_num_logits)


def join_scores(
    parts: tuple[LogprobsTensors, LogprobsTensors],
    logit_idx: tuple[torch.Tensor, torch.Tensor],
    cu_num_logits: list[int] | torch.Tensor | None,
) -> LogprobsTensors:
    """Put the rows of two parts in the order of their logit rows.

    Args:
        parts: of any number of candidates; the fewer are filled up.
        logit_idx: of each part, [n] int64, which rows they are.
        cu_num_logits: of the joined rows, as in `compute_topk_scores`.
    """
    width = max(part.logprobs.shape[1] for part in parts)
    padded = []
    for part in parts:
        padding = 0, width - part.logprobs.shape[1]
        token_ids = F.pad(part.logprob_token_ids, padding, value=PADDING_TOKEN_ID)
        scores = F.pad(part.logprobs, padding, value=float("-inf"))
        padded.append(LogprobsTensors(token_ids, scores, part.selected_token_ranks))
    order = torch.cat(logit_idx).argsort()
    token_ids, scores, ranks = (x[order] for x in LogprobsTensors.cat(padded)[:3])
    return _with_boundaries(token_ids, scores, ranks, cu_num_logits)


def _with_boundaries(
    token_ids: torch.Tensor,
    scores: torch.Tensor,
    ranks: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None,
) -> LogprobsTensors:
    token_ids = token_ids.to(torch.int32)
    if isinstance(cu_num_logits, torch.Tensor):
        boundaries = cu_num_logits.clone()
        return LogprobsTensors(token_ids, scores, ranks, None, boundaries)
    return LogprobsTensors(token_ids, scores, ranks, cu_num_logits)


def logprob_stats(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what turns a row's logits into log-probabilities, and a token's rank.

    Args:
        logits: [num_logits, vocab_size] float32, rows contiguous.
        token_ids: [num_logits] int64.

    Returns:
        logsumexp: [num_logits] float32.
        rank: [num_logits] int32, 1 + the number of strictly greater logits.

    Twin: _logprob_stats_torch.
    """
    if logits.is_cuda:
        return _logprob_stats_triton(logits, token_ids)
    if ops.has_cpu_ops() and logits.is_contiguous():
        return ops.logprob_stats(logits, token_ids)
    return _logprob_stats_torch(logits, token_ids)


def place_chosen_token_ids(
    token_ids: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    chosen_token_ids: RaggedRows,
) -> None:
    """Put the requests' own candidates into the columns after the first.

    Args:
        token_ids: [num_logits, 1 + num_candidates] int64, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        chosen_token_ids: rows without a list keep their columns.
    """
    impl = (
        _place_chosen_token_ids_triton
        if token_ids.is_cuda
        else _place_chosen_token_ids_torch
    )
    impl(token_ids, expanded_idx_mapping, chosen_token_ids)


def _likeliest_token_ids(logits: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Return the ids of the largest logits, in order; of equal ones the lower id first.

    A batch has as many candidates as its widest request wants: without one rule for
    ties, a narrow request's would change with its neighbours.

    Returns:
        [num_logits, num_candidates] int64.
    """
    native = ops.maybe_step_ops()
    if native is not None and not logits.is_cuda and logits.dtype is torch.float32:
        return native.likeliest_tokens(logits, num_candidates)
    if num_candidates == logits.shape[1]:
        return logits.argsort(dim=-1, descending=True, stable=True)
    impl = _likeliest_by_key if logits.is_cuda else _likeliest_by_value
    return impl(logits, num_candidates)


def _likeliest_by_key(logits: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Order by one integer for logit and id: no wait for the device."""
    # Adding 0 makes one value of -0.0 and 0.0.
    bits = (logits + 0.0).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64) << 32
    keys -= torch.arange(logits.shape[1], device=logits.device)
    return keys.topk(num_candidates, dim=-1).indices


def _likeliest_by_value(logits: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Repair the ties of `topk`, which has no rule for them: fast where they are few.

    Twin: _likeliest_by_key.
    """
    # One more than wanted shows whether equal logits stand on both sides of the border.
    values, token_ids = logits.topk(num_candidates + 1, dim=-1)
    token_ids, by_id = token_ids[:, :-1].sort(dim=-1)
    by_value = (
        values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    )
    token_ids = token_ids.gather(1, by_value)
    is_cut = values[:, -2] == values[:, -1]
    for logit_idx in is_cut.nonzero().flatten().tolist():
        border = values[logit_idx, -1]
        num_above = int((values[logit_idx] > border).sum())
        tied = (logits[logit_idx] == border).nonzero().flatten()
        token_ids[logit_idx, num_above:] = tied[: num_candidates - num_above]
    return token_ids


def _logprob_stats_torch(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    selected = logits.gather(1, token_ids.unsqueeze(1))
    rank = 1 + (logits > selected).sum(dim=-1, dtype=torch.int32)
    return logits.logsumexp(dim=-1), rank


def _place_chosen_token_ids_torch(
    token_ids: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    chosen_token_ids: RaggedRows,
) -> None:
    (chosen,) = chosen_token_ids.values
    has_list = chosen_token_ids.lengths.gpu[expanded_idx_mapping] > 0
    token_ids[:, 1:].masked_fill_(has_list.unsqueeze(1), PADDING_TOKEN_ID)
    logit_idx, value_idx = chosen_token_ids.expand(expanded_idx_mapping)
    starts = chosen_token_ids.starts.gpu[expanded_idx_mapping[logit_idx]]
    token_ids[logit_idx, 1 + value_idx - starts] = chosen[value_idx].long()


def _logprob_stats_triton(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_logits, vocab_size = logits.shape
    logsumexp = torch.empty(num_logits, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_logits, dtype=torch.int32, device=logits.device)
    _logprob_stats_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        token_ids,
        logsumexp,
        rank,
        vocab_size,
        BLOCK_SIZE=2048,
    )
    return logsumexp, rank


def _place_chosen_token_ids_triton(
    token_ids: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    chosen_token_ids: RaggedRows,
) -> None:
    (chosen,) = chosen_token_ids.values
    num_candidates = token_ids.shape[1] - 1
    _place_chosen_token_ids_kernel[(token_ids.shape[0],)](
        token_ids,
        token_ids.stride(0),
        expanded_idx_mapping,
        chosen_token_ids.starts.gpu,
        chosen_token_ids.lengths.gpu,
        chosen,
        num_candidates,
        PADDING_TOKEN_ID,
        BLOCK_SIZE=128,
    )


@triton.jit
def _logprob_stats_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    token_ids_ptr,  # [num_logits]
    logsumexp_ptr,  # [num_logits]
    rank_ptr,  # [num_logits]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row.
    logit_idx = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + logit_idx * logits_stride
    selected = tl.load(row_ptr + tl.load(token_ids_ptr + logit_idx))

    row_max = float("-inf")
    num_greater = 0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        block = tl.load(
            row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")
        )
        row_max = tl.maximum(row_max, tl.max(block, axis=0))
        num_greater += tl.sum((block > selected).to(tl.int32), axis=0)

    total = 0.0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        block = tl.load(
            row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")
        )
        total += tl.sum(tl.exp(block - row_max), axis=0)
    tl.store(logsumexp_ptr + logit_idx, row_max + tl.log(total))
    tl.store(rank_ptr + logit_idx, num_greater + 1)


@triton.jit
def _place_chosen_token_ids_kernel(
    token_ids_ptr,  # [num_logits, 1 + num_candidates]
    token_ids_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    starts_ptr,  # [max_num_reqs]
    lengths_ptr,  # [max_num_reqs]
    chosen_ptr,  # [sum of lengths]
    num_candidates,
    padding_token_id,
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    length = tl.load(lengths_ptr + req_state_idx)
    if length == 0:
        return
    list_start = tl.load(starts_ptr + req_state_idx)
    row_ptr = token_ids_ptr + logit_idx * token_ids_stride + 1
    for first in range(0, num_candidates, BLOCK_SIZE):
        column = first + tl.arange(0, BLOCK_SIZE)
        token_id = tl.load(
            chosen_ptr + list_start + column,
            mask=column < length,
            other=padding_token_id,
        )
        tl.store(row_ptr + column, token_id.to(tl.int64), mask=column < num_candidates)
