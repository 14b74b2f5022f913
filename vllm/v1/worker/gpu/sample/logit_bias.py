"""logit_bias: add a number to the logits of chosen tokens."""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.ragged import RaggedRows


class LogitBiasState:
    """The biased tokens of each request.

    Args:
        max_num_reqs: rows.
        device: where the device arrays live.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        # Token ids and what to add to their logits.
        self.biases = RaggedRows(max_num_reqs, (torch.int32, torch.float32), device)

    def add_request(self, req_state_idx: int, sampling_params: SamplingParams) -> None:
        """Fill the request's row."""
        self.biases.clear_row(req_state_idx)
        logit_bias = sampling_params.logit_bias
        self.is_used_np[req_state_idx] = bool(logit_bias)
        if logit_bias:
            self.biases.set_row(
                req_state_idx,
                np.fromiter(logit_bias.keys(), dtype=np.int32),
                np.fromiter(logit_bias.values(), dtype=np.float32),
            )

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.is_used_np[req_state_idx] = False
        self.biases.clear_row(req_state_idx)

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        self.biases.apply_staged_writes()


def apply_logit_bias(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, biases: RaggedRows
) -> None:
    """Add to the logits of each row's chosen tokens.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        biases: token ids (no id twice in a row) and float32 numbers.
    """
    impl = _apply_logit_bias_triton if logits.is_cuda else _apply_logit_bias_torch
    impl(logits, expanded_idx_mapping, biases)


def _apply_logit_bias_torch(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, biases: RaggedRows
) -> None:
    token_ids, bias = biases.values
    logit_idx, value_idx = biases.expand(expanded_idx_mapping)
    logits[logit_idx, token_ids[value_idx]] += bias[value_idx]


def _apply_logit_bias_triton(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, biases: RaggedRows
) -> None:
    token_ids, bias = biases.values
    _logit_bias_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        biases.starts.gpu,
        biases.lengths.gpu,
        token_ids,
        bias,
        BLOCK_SIZE=256,
    )


@triton.jit
def _logit_bias_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    starts_ptr,  # [max_num_reqs]
    lengths_ptr,  # [max_num_reqs]
    token_ids_ptr,  # [sum of lengths]
    bias_ptr,  # [sum of lengths]
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    list_start = tl.load(starts_ptr + req_state_idx)
    length = tl.load(lengths_ptr + req_state_idx)
    row_ptr = logits_ptr + logit_idx * logits_stride
    for first in range(0, length, BLOCK_SIZE):
        offsets = first + tl.arange(0, BLOCK_SIZE)
        mask = offsets < length
        token_id = tl.load(token_ids_ptr + list_start + offsets, mask=mask, other=0)
        bias = tl.load(bias_ptr + list_start + offsets, mask=mask, other=0.0)
        logits = tl.load(row_ptr + token_id, mask=mask, other=0.0)
        tl.store(row_ptr + token_id, logits + bias, mask=mask)
