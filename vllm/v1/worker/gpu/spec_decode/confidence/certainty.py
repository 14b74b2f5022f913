"""How sure a drafter is of its likeliest token."""

import torch

from vllm.triton_utils import tl, triton

# Keeps the logit of a certain token finite.
_EPS = 1e-6


def compute_certainty(
    logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return the logit of the largest probability, at the request's temperature.

    It reads the distribution that a draft is drawn from, and never the draw.

    Args:
        logits: [num_rows, vocab_size] float32, temperature not yet applied.
        idx_mapping: [num_rows] int32, row -> request row.
        temperature: [max_num_reqs] float32; 0 (greedy) counts as 1.

    Returns:
        [num_rows] float32; NaN if there is no choice or the row holds NaN.

    Twin: _compute_certainty_torch.
    """
    impl = _compute_certainty_triton if logits.is_cuda else _compute_certainty_torch
    return impl(logits, idx_mapping, temperature)


def _compute_certainty_torch(
    logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    divisor = temperature[idx_mapping].unsqueeze(1)
    probs = (logits / divisor.masked_fill(divisor == 0, 1.0)).softmax(dim=-1)
    return probs.amax(dim=-1).logit(eps=_EPS)


def _compute_certainty_triton(
    logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    certainty = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _compute_certainty_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        certainty,
        vocab_size,
        _EPS,
        BLOCK_SIZE=2048,
    )
    return certainty


@triton.jit
def _compute_certainty_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    idx_mapping_ptr,  # [num_rows]
    temperature_ptr,  # [max_num_reqs]
    certainty_ptr,  # [num_rows]
    vocab_size,
    eps,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per row.
    row_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(idx_mapping_ptr + row_idx).to(tl.int64)
    temperature = tl.load(temperature_ptr + req_state_idx)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    row_ptr = logits_ptr + row_idx * logits_stride
    row_max = float("-inf")
    num_nans = 0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < vocab_size
        block = tl.load(row_ptr + offsets, mask=mask, other=float("-inf"))
        num_nans += tl.sum((block != block).to(tl.int32), axis=0)
        block = tl.where(block == block, block, float("-inf"))
        row_max = tl.maximum(row_max, tl.max(block, axis=0))
    is_broken = (num_nans > 0) | (row_max == float("-inf"))
    row_max = tl.where(is_broken, 0.0, row_max)
    total = 0.0
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < vocab_size
        block = tl.load(row_ptr + offsets, mask=mask, other=float("-inf"))
        block = tl.where(is_broken, 0.0, block - row_max)
        total += tl.sum(tl.exp(block / temperature), axis=0)
    # The largest probability is exp(0) / total.
    prob = tl.minimum(tl.maximum(1.0 / total, eps), 1.0 - eps)
    certainty = tl.log(prob / (1.0 - prob))
    certainty = tl.where(is_broken, float("nan"), certainty)
    tl.store(certainty_ptr + row_idx, certainty)
