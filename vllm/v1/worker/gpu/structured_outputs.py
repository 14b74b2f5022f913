"""Grammar masks on the logits: each mask finds its row in the verified layout.

The host packs the masks by the scheduled layout and gives each a (request, position)
key. Which row that is, and whether it exists at all, is read from the device.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor


class StructuredOutputsWorker:
    """Carries the masks of a step to the device and applies them.

    Args:
        max_num_logits: rows of the largest step, in the scheduled layout.
        vocab_size: width of the logits.
        device: where the logits are.
        mask_stride: positions that a request can have: drafts + bonus rows.
        num_bonus_tokens: rows of a sampling request beside its drafts.
    """

    def __init__(
        self,
        max_num_logits: int,
        vocab_size: int,
        device: torch.device,
        mask_stride: int,
        num_bonus_tokens: int,
    ) -> None:
        self._mask_stride = mask_stride
        self._num_bonus_tokens = num_bonus_tokens
        self._mapping = UvaBackedTensor(max_num_logits, torch.int32, device)
        self._bitmask = UvaBackedTensor(
            (max_num_logits, triton.cdiv(vocab_size, 32)), torch.int32, device
        )

    def apply_grammar_bitmask(
        self,
        logits: torch.Tensor,
        layout: BatchLayout,
        req_ids: list[str],
        grammar_output: GrammarOutput,
        first_logit_idx: int = 0,
    ) -> None:
        """Set to -inf what the grammars do not allow; other requests' rows stay.

        Args:
            logits: [num_logits, vocab_size] float32, consecutive rows of the verified
                layout, changed in place.
            layout: of the step.
            req_ids: [num_reqs] in batch order.
            grammar_output: the masks, in the scheduled layout.
            first_logit_idx: which row of the step row 0 of the logits is.
        """
        mapping = _build_grammar_mapping(
            req_ids,
            grammar_output.structured_output_request_ids,
            layout.cu_num_logits_np,
            layout.num_draft_tokens_per_req,
            self._num_bonus_tokens,
            self._mask_stride,
        )
        num_masks = len(grammar_output.grammar_bitmask)
        assert num_masks == len(mapping), (
            f"{num_masks} grammar masks for {len(mapping)} scheduled rows"
        )
        if num_masks == 0:
            return
        self._mapping.np[:num_masks] = mapping
        self._bitmask.np[:num_masks] = grammar_output.grammar_bitmask
        apply_grammar_bitmask(
            logits,
            self._bitmask.copy_to_device(num_masks),
            self._mapping.copy_to_device(num_masks),
            layout.cu_num_logits,
            self._mask_stride,
            first_logit_idx,
        )


def apply_grammar_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    mask_stride: int,
    first_logit_idx: int = 0,
) -> None:
    """Set to -inf, in the rows that exist, every token whose bit is 0.

    Args:
        logits: [num_logits, vocab_size] float32, changed in place.
        bitmask: [num_masks, ceil(vocab_size / 32)] int32, token 0 in the lowest bit.
        mapping: [num_masks] int32, batch_idx * mask_stride + position. A position past
            the request's verified rows is inactive.
        cu_num_logits: [num_reqs + 1] int32, verified rows.
        mask_stride: positions that a request can have.
        first_logit_idx: which row of the step row 0 of the logits is; masks of rows
            that are not among them are inactive.
    """
    impl = _apply_grammar_bitmask_triton
    if not logits.is_cuda:
        impl = _apply_grammar_bitmask_torch
    impl(logits, bitmask, mapping, cu_num_logits, mask_stride, first_logit_idx)


def _build_grammar_mapping(
    req_ids: list[str],
    grammar_req_ids: list[str],
    cu_num_logits_np: np.ndarray,
    num_draft_tokens_per_req: Sequence[int] | np.ndarray | None,
    num_bonus_tokens: int,
    mask_stride: int,
) -> list[int]:
    """Return the (request, position) key of every mask, in the order of the masks.

    Args:
        req_ids: [num_reqs] in batch order.
        grammar_req_ids: in the order of the masks.
        cu_num_logits_np: [num_reqs + 1] int32, scheduled rows.
        num_draft_tokens_per_req: [num_reqs] scheduled drafts; None: no drafts.
        num_bonus_tokens: rows of a sampling request beside its drafts.
        mask_stride: positions that a request can have.

    Returns:
        batch_idx * mask_stride + position for each scheduled row.
    """
    batch_idx_of = {req_id: batch_idx for batch_idx, req_id in enumerate(req_ids)}
    mapping: list[int] = []
    for req_id in grammar_req_ids:
        batch_idx = batch_idx_of[req_id]
        if num_draft_tokens_per_req is None:
            start, end = cu_num_logits_np[batch_idx : batch_idx + 2]
            num_positions = int(end - start)
        else:
            num_positions = int(num_draft_tokens_per_req[batch_idx]) + num_bonus_tokens
        first = batch_idx * mask_stride
        mapping.extend(range(first, first + num_positions))
    return mapping


def _apply_grammar_bitmask_torch(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    mask_stride: int,
    first_logit_idx: int = 0,
) -> None:
    """The meaning of the kernel below, and the CPU path."""
    batch_idx = mapping // mask_stride
    logit_idx = cu_num_logits[batch_idx] + mapping % mask_stride
    is_active = logit_idx < cu_num_logits[batch_idx + 1]
    row = logit_idx - first_logit_idx
    is_active &= (row >= 0) & (row < logits.shape[0])
    rows = torch.where(is_active, row, -1).to(torch.int32)
    ops.apply_bitmask(logits, bitmask, rows)


def _apply_grammar_bitmask_triton(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    mask_stride: int,
    first_logit_idx: int = 0,
) -> None:
    num_masks = bitmask.shape[0]
    num_logits, vocab_size = logits.shape
    block_size = min(8192, triton.next_power_of_2(vocab_size))
    _apply_grammar_bitmask_kernel[(num_masks, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        bitmask,
        bitmask.stride(0),
        mapping,
        cu_num_logits,
        mask_stride,
        first_logit_idx,
        num_logits,
        vocab_size,
        BLOCK_SIZE=block_size,
    )


@triton.jit
def _apply_grammar_bitmask_kernel(
    logits_ptr,  # [num_logits, vocab_size]
    logits_stride,
    bitmask_ptr,  # [num_masks, ceil(vocab_size / 32)]
    bitmask_stride,
    mapping_ptr,  # [num_masks]
    cu_num_logits_ptr,  # [num_reqs + 1]
    mask_stride,
    first_logit_idx,
    num_logits,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    # One program per mask and block of tokens.
    mask_idx = tl.program_id(0).to(tl.int64)
    key = tl.load(mapping_ptr + mask_idx)
    batch_idx = key // mask_stride
    logit_idx = tl.load(cu_num_logits_ptr + batch_idx).to(tl.int64) + key % mask_stride
    # This position is not verified in this step: its row is another request's.
    if logit_idx >= tl.load(cu_num_logits_ptr + batch_idx + 1):
        return
    logit_idx -= first_logit_idx
    if (logit_idx < 0) | (logit_idx >= num_logits):
        return
    token_ids = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_vocab = token_ids < vocab_size
    words = tl.load(
        bitmask_ptr + mask_idx * bitmask_stride + token_ids // 32,
        mask=in_vocab,
        other=-1,
    )
    is_refused = ((words >> (token_ids % 32)) & 1) == 0
    tl.store(
        logits_ptr + logit_idx * logits_stride + token_ids,
        float("-inf"),
        mask=in_vocab & is_refused,
    )
