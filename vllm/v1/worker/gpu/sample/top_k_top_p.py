"""Top-k and top-p filtering: keep the likely tokens, whole groups of equal ones."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton


def apply_top_k_top_p(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Set to -inf every logit outside the top k, then outside the top p of the rest.

    Top-k keeps every logit that is at least the k-th largest. Top-p looks at the
    softmax of what is left: a token stays iff the tokens that are strictly more likely
    have a probability sum below p. So equal logits stay or go together, and one always
    stays.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        top_k: [max_num_reqs] int32; 0 keeps all.
        top_p: [max_num_reqs] float32 in (0, 1]; 1 keeps all.

    Raises:
        ValueError: logits is not float32 or its rows are not contiguous.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration",
    arXiv:1904.09751. Twin: _top_k_top_p_torch.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"apply_top_k_top_p needs row-contiguous float32 logits, got "
            f"{logits.dtype} with strides {logits.stride()}"
        )
    row_top_k = top_k[expanded_idx_mapping]
    row_top_p = top_p[expanded_idx_mapping]
    if logits.is_cuda:
        _top_k_top_p_triton(logits, row_top_k, row_top_p)
    elif ops.has_cpu_ops() and logits.is_contiguous():
        ops.top_k_top_p(logits, row_top_k, row_top_p)
    else:
        _top_k_top_p_torch(logits, row_top_k, row_top_p)


def _top_k_top_p_torch(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """The meaning of the kernel below, by a full sort.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        top_k: [num_logits] int32.
        top_p: [num_logits] float32.
    """
    vocab_size = logits.shape[-1]
    rows = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(-1)
    if rows.numel() == 0:
        return
    filtered = logits[rows]
    filtered.masked_fill_(filtered.isnan(), float("-inf"))
    ordered = filtered.sort(dim=-1, descending=True).values

    k = top_k[rows].long()
    last = torch.where(k > 0, k.clamp(max=vocab_size), vocab_size) - 1
    kth_largest = ordered.gather(1, last.unsqueeze(1))
    ordered.masked_fill_(ordered < kth_largest, float("-inf"))

    weights = (ordered - ordered[:, :1]).exp().to(torch.float64)
    more_likely = weights.cumsum(dim=-1) - weights
    # All of a group of equal logits see the sum before the group's first.
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    more_likely = more_likely.masked_fill(~is_first, 0.0).cummax(dim=-1).values
    p = top_p[rows].to(torch.float64).unsqueeze(1)
    is_kept = more_likely < p * weights.sum(dim=-1, keepdim=True)
    is_kept |= p >= 1
    # What is kept is a prefix of the sorted row, empty only where nothing can be kept.
    last_kept = (is_kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    threshold = ordered.gather(1, last_kept)
    threshold = torch.maximum(threshold, kth_largest)
    logits[rows] = filtered.masked_fill_(filtered < threshold, float("-inf"))


def _top_k_top_p_triton(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    num_logits, vocab_size = logits.shape
    _top_k_top_p_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        top_k,
        top_p,
        vocab_size,
        BLOCK_SIZE=2048,
    )


@triton.jit
def _load_block(row_ptr, start, vocab_size, BLOCK_SIZE: tl.constexpr):
    # NaN counts as -inf.
    offsets = start + tl.arange(0, BLOCK_SIZE)
    logits = tl.load(row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _order_key(logits):
    # An integer that is ordered as the float is; -0.0 and 0.0 are one value.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _find_threshold(
    row_ptr,
    vocab_size,
    floor_key,
    row_max,
    needed,
    IS_MASS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    # The largest key t such that the tokens with key >= t (and >= floor_key) number, or
    # weigh, at least `needed`. Two bits of t in each pass over the row.
    threshold = tl.full((), -2147483648, tl.int64)
    for step in range(16):
        stride = tl.full((), 1, tl.int64) << (30 - 2 * step)
        total_1 = tl.full((), 0.0, tl.float64)
        total_2 = tl.full((), 0.0, tl.float64)
        total_3 = tl.full((), 0.0, tl.float64)
        for start in range(0, vocab_size, BLOCK_SIZE):
            logits = _load_block(row_ptr, start, vocab_size, BLOCK_SIZE)
            key = _order_key(logits)
            if IS_MASS:
                weight = tl.exp(logits - row_max).to(tl.float64)
            else:
                weight = tl.full((BLOCK_SIZE,), 1.0, tl.float64)
            # Padding has the key of -inf, which is never above a finite floor.
            weight = tl.where(key >= floor_key, weight, 0.0)
            total_1 += tl.sum(tl.where(key >= threshold + stride, weight, 0.0), axis=0)
            total_2 += tl.sum(
                tl.where(key >= threshold + 2 * stride, weight, 0.0), axis=0
            )
            total_3 += tl.sum(
                tl.where(key >= threshold + 3 * stride, weight, 0.0), axis=0
            )
        num_strides = (total_1 >= needed).to(tl.int64)
        num_strides += (total_2 >= needed).to(tl.int64)
        num_strides += (total_3 >= needed).to(tl.int64)
        threshold += num_strides * stride
    return threshold


@triton.jit
def _top_k_top_p_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    top_k_ptr,  # [num_logits]
    top_p_ptr,  # [num_logits]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row: a search for the threshold, without a sort.
    logit_idx = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + logit_idx)
    top_p = tl.load(top_p_ptr + logit_idx)
    if top_k == 0 and top_p >= 1.0:
        return
    row_ptr = logits_ptr + logit_idx * logits_stride

    threshold = tl.full((), -2147483648, tl.int64)
    if top_k > 0:
        threshold = _find_threshold(
            row_ptr,
            vocab_size,
            threshold,
            0.0,
            tl.minimum(top_k, vocab_size).to(tl.float64),
            IS_MASS=False,
            BLOCK_SIZE=BLOCK_SIZE,
        )
    if top_p < 1.0:
        row_max = float("-inf")
        for start in range(0, vocab_size, BLOCK_SIZE):
            logits = _load_block(row_ptr, start, vocab_size, BLOCK_SIZE)
            row_max = tl.maximum(row_max, tl.max(logits, axis=0))
        if row_max > float("-inf"):
            mass = tl.full((), 0.0, tl.float64)
            for start in range(0, vocab_size, BLOCK_SIZE):
                logits = _load_block(row_ptr, start, vocab_size, BLOCK_SIZE)
                weight = tl.exp(logits - row_max).to(tl.float64)
                weight = tl.where(_order_key(logits) >= threshold, weight, 0.0)
                mass += tl.sum(weight, axis=0)
            threshold = tl.maximum(
                threshold,
                _find_threshold(
                    row_ptr,
                    vocab_size,
                    threshold,
                    row_max,
                    mass * top_p.to(tl.float64),
                    IS_MASS=True,
                    BLOCK_SIZE=BLOCK_SIZE,
                ),
            )
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        logits = _load_block(row_ptr, start, vocab_size, BLOCK_SIZE)
        logits = tl.where(_order_key(logits) >= threshold, logits, float("-inf"))
        tl.store(row_ptr + offsets, logits, mask=offsets < vocab_size)
