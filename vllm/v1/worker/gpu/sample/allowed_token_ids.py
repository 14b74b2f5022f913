"""allowed_token_ids: every other token is out."""

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor, to_device


class AllowedTokenIdsState:
    """A bitmask over the vocabulary for each request that has a list.

    Args:
        max_num_reqs: rows.
        vocab_size: width of the logits.
        device: where the device arrays live.
    """

    def __init__(
        self, max_num_reqs: int, vocab_size: int, device: torch.device
    ) -> None:
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        # [max_num_reqs] uint8
        self.is_used = UvaBackedTensor(max_num_reqs, torch.uint8, device)
        # [max_num_reqs, ceil(vocab_size / 32)] int32; a set bit allows a token.
        self.bitmask = torch.zeros(
            (max_num_reqs, -(-vocab_size // 32)), dtype=torch.int32, device=device
        )
        self._staged: dict[int, np.ndarray] = {}
        self._is_stale = False

    def add_request(self, req_state_idx: int, sampling_params: SamplingParams) -> None:
        """Fill the request's row."""
        self.remove_request(req_state_idx)
        if sampling_params.allowed_token_ids is None:
            return
        is_allowed = np.zeros(self.bitmask.shape[1] * 32, dtype=np.uint8)
        is_allowed[sampling_params.allowed_token_ids] = 1
        packed = np.packbits(is_allowed, bitorder="little")
        self._staged[req_state_idx] = packed.view("<i4")
        self.is_used_np[req_state_idx] = True
        self.is_used.np[req_state_idx] = 1
        self._is_stale = True

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        if self.is_used_np[req_state_idx]:
            self.is_used_np[req_state_idx] = False
            self.is_used.np[req_state_idx] = 0
            self._staged.pop(req_state_idx, None)
            self._is_stale = True

    def apply_staged_writes(self) -> None:
        """Make the changed rows visible to the device."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.is_used.copy_to_device()
        for req_state_idx, packed in self._staged.items():
            self.bitmask[req_state_idx].copy_(
                to_device(packed, self.bitmask.device), non_blocking=True
            )
        self._staged.clear()


def apply_allowed_token_ids(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    is_used: torch.Tensor,
    bitmask: torch.Tensor,
) -> None:
    """Set to -inf every logit whose token is not in its request's list.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        expanded_idx_mapping: [num_logits] int32, logit row -> request state row.
        is_used: [max_num_reqs] uint8; 0 leaves the row unchanged.
        bitmask: [max_num_reqs, ceil(vocab_size / 32)] int32; a set bit allows a token.
    """
    if logits.is_cuda:
        _apply_allowed_token_ids_triton(logits, expanded_idx_mapping, is_used, bitmask)
    elif ops.has_cpu_ops() and logits.is_contiguous():
        rows = is_used[expanded_idx_mapping].nonzero().squeeze(-1)
        words = bitmask[expanded_idx_mapping[rows]]
        ops.apply_bitmask(logits, words, rows.to(torch.int32))
    else:
        _apply_allowed_token_ids_torch(logits, expanded_idx_mapping, is_used, bitmask)


def _apply_allowed_token_ids_torch(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    is_used: torch.Tensor,
    bitmask: torch.Tensor,
) -> None:
    rows = is_used[expanded_idx_mapping].nonzero().squeeze(-1)
    words = bitmask[expanded_idx_mapping[rows]]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_out = ((words.unsqueeze(-1) >> shifts) & 1 == 0).flatten(1)
    logits[rows] = logits[rows].masked_fill_(
        is_out[:, : logits.shape[1]], float("-inf")
    )


def _apply_allowed_token_ids_triton(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    is_used: torch.Tensor,
    bitmask: torch.Tensor,
) -> None:
    num_logits, vocab_size = logits.shape
    block_size = 1024
    _allowed_token_ids_kernel[(num_logits, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        is_used,
        bitmask,
        bitmask.stride(0),
        vocab_size,
        BLOCK_SIZE=block_size,
    )


@triton.jit
def _allowed_token_ids_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    expanded_idx_mapping_ptr,  # [num_logits]
    is_used_ptr,  # [max_num_reqs]
    bitmask_ptr,  # [max_num_reqs, ceil(vocab_size / 32)]
    bitmask_stride,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    logit_idx = tl.program_id(0).to(tl.int64)
    req_state_idx = tl.load(expanded_idx_mapping_ptr + logit_idx).to(tl.int64)
    if tl.load(is_used_ptr + req_state_idx) == 0:
        return
    token_id = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_token = token_id < vocab_size
    word = tl.load(
        bitmask_ptr + req_state_idx * bitmask_stride + token_id // 32,
        mask=is_token,
        other=-1,
    )
    is_out = (word >> (token_id % 32)) & 1 == 0
    tl.store(
        logits_ptr + logit_idx * logits_stride + token_id,
        float("-inf"),
        mask=is_token & is_out,
    )
