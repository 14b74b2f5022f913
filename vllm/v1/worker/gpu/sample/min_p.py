"""min-p filtering: drop tokens far less likely than the most likely one.

Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", arXiv:2407.01082.
"""

import torch

from vllm.triton_utils import tl, triton


def apply_min_p(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Set to -inf every logit whose probability is below min_p x the top one.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        min_p: [max_num_reqs] float32 in [0, 1]; 0 leaves the row unchanged.

    Raises:
        ValueError: logits is not float32 or its rows are not contiguous.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(
            f"apply_min_p needs row-contiguous float32 logits, got {logits.dtype} "
            f"with strides {logits.stride()}"
        )
    impl = _apply_min_p_triton if logits.is_cuda else _apply_min_p_torch
    impl(logits, expanded_idx_mapping, min_p)


def _apply_min_p_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    row_min_p = min_p[expanded_idx_mapping]
    filtered_rows = row_min_p.nonzero().squeeze(-1)
    is_whole = filtered_rows.numel() == logits.shape[0]
    filtered = logits if is_whole else logits[filtered_rows]
    # log p >= log p_max + log min_p.
    threshold = filtered.amax(dim=-1) + row_min_p[filtered_rows].log()
    filtered.masked_fill_(filtered < threshold.unsqueeze(-1), float("-inf"))
    if not is_whole:
        logits[filtered_rows] = filtered


def _apply_min_p_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    num_logits, vocab_size = logits.shape
    _min_p_kernel[(num_logits,)](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        min_p,
        vocab_size,
        BLOCK_SIZE=1024,
    )


@triton.jit
def _min_p_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    min_p_ptr,  # [max_num_reqs]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per logit row.
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    min_p = tl.load(min_p_ptr + req_state_idx)
    if min_p == 0.0:
        return
    row_ptr = logits_ptr + logit_idx * logits_stride

    row_max = float("-inf")
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        block = tl.load(
            row_ptr + offsets, mask=offsets < vocab_size, other=float("-inf")
        )
        row_max = tl.maximum(row_max, tl.max(block, axis=0))

    threshold = row_max + tl.log(min_p)
    for start in range(0, vocab_size, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < vocab_size
        block = tl.load(row_ptr + offsets, mask=mask, other=float("-inf"))
        block = tl.where(block < threshold, float("-inf"), block)
        tl.store(row_ptr + offsets, block, mask=mask)
