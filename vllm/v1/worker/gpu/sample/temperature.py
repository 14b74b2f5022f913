"""Temperature: divide the logits, flattening or sharpening their softmax."""

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton


def apply_temperature(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
) -> None:
    """Divide each row by its request's temperature.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        temperature: [max_num_reqs] float32; 0 (greedy) and 1 leave the row unchanged.
    """
    impl = _apply_temperature_torch
    if logits.is_cuda:
        impl = _apply_temperature_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.apply_temperature
    impl(logits, expanded_idx_mapping, temperature)


def _apply_temperature_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
) -> None:
    divisor = temperature[expanded_idx_mapping].unsqueeze(-1)
    logits.div_(divisor.masked_fill(divisor == 0, 1.0))


def _apply_temperature_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
) -> None:
    num_logits, vocab_size = logits.shape
    block_size = 1024
    _temperature_kernel[(num_logits, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        temperature,
        vocab_size,
        BLOCK_SIZE=block_size,
    )


@triton.jit
def _temperature_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    temperature_ptr,  # [max_num_reqs]
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    temperature = tl.load(temperature_ptr + req_state_idx)
    if temperature == 0.0 or temperature == 1.0:
        return
    offsets = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < vocab_size
    row_ptr = logits_ptr + logit_idx * logits_stride
    logits = tl.load(row_ptr + offsets, mask=mask, other=0.0)
    # As torch divides: rounded to nearest.
    tl.store(row_ptr + offsets, tl.div_rn(logits, temperature), mask=mask)
