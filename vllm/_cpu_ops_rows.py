"""The request rows of a step in one call of the compiled CPU operators, at its ends.

The rows are described to the compiled side once, a layout when it is new: what is left
to a step that is laid out as the last one are its tokens. Their twins are the functions
of a step in `input_batch` and `block_table`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm._cpu_ops_decoder import address_of
from vllm._cpu_ops_step import StepOps, new


@dataclass(frozen=True)
class RequestRows:
    """The persistent arrays of all requests, by req_state_idx.

    Args:
        all_token_ids: [max_num_reqs, max_model_len] int32.
        total_len: [max_num_reqs] int32, known tokens.
        draft_tokens: [max_num_reqs, num_speculative_tokens] int64.
        num_computed_tokens: [max_num_reqs] int32.
        block_rows: [max_num_reqs, max_num_blocks] int32.
        block_size: tokens a block.
    """

    all_token_ids: torch.Tensor
    total_len: torch.Tensor
    draft_tokens: torch.Tensor
    num_computed_tokens: torch.Tensor
    block_rows: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens and logit rows of a step stand.

    Args:
        idx_mapping: [num_reqs] int32.
        query_start_loc: [num_reqs + 1] int32.
        num_tokens: the last of them.
        cu_num_logits: [num_reqs + 1] int32.
        num_logits: the last of them.
    """

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    num_tokens: int
    cu_num_logits: torch.Tensor
    num_logits: int


class FusedRows:
    """The rows, known by their addresses.

    Args:
        ops: the compiled operators.
        rows: that stay where they are.
    """

    def __init__(self, ops: StepOps, rows: RequestRows) -> None:
        self.ops = ops
        # They live as long as their addresses are known.
        self._rows = rows
        max_num_reqs, max_model_len = rows.all_token_ids.shape
        max_drafts, max_blocks = rows.draft_tokens.shape[1], rows.block_rows.shape[1]
        ints, one = torch.int32, (max_num_reqs,)
        token_ids = address_of(rows.all_token_ids, (*one, max_model_len), ints)
        total_len = address_of(rows.total_len, one, ints)
        num_computed = address_of(rows.num_computed_tokens, one, ints)
        self.inputs = (
            token_ids,
            max_num_reqs,
            max_model_len,
            total_len,
            address_of(rows.draft_tokens, (*one, max_drafts), torch.int64),
            max_drafts,
            num_computed,
            address_of(rows.block_rows, (*one, max_blocks), ints),
            max_blocks,
            rows.block_size,
        )
        self.advanced = (
            token_ids,
            max_num_reqs,
            max_model_len,
            total_len,
            num_computed,
        )

    def lay_out(self, layout: RowLayout) -> "LaidOutRows":
        """Return the rows in the order of a step."""
        return LaidOutRows(self, layout)


class LaidOutRows:
    """The rows of the requests of a step, and of all steps that are laid out as it is.

    Args:
        rows: of all requests.
        layout: of the step.

    Attributes:
        logit_rows: logits_indices, expanded_idx_mapping and expanded_local_pos, as
            `InputBatch` has them; written with the inputs of a step, always the same.
    """

    def __init__(self, rows: FusedRows, layout: RowLayout) -> None:
        self._rows = rows
        self._c = rows.ops._c
        # It lives as long as its addresses are known.
        self._layout = layout
        num_reqs, num_logits = layout.idx_mapping.shape[0], layout.num_logits
        num_tokens = layout.num_tokens
        bounds = (num_reqs + 1,)
        idx_mapping = address_of(layout.idx_mapping, (num_reqs,), torch.int32)
        tokens = address_of(layout.query_start_loc, bounds, torch.int32)
        logits = address_of(layout.cu_num_logits, bounds, torch.int32)
        self.logit_rows = (
            new(num_logits, np.int64),
            new(num_logits, np.int32),
            new(num_logits, np.int32),
        )
        self._num_reqs, self._num_tokens = num_reqs, num_tokens
        self._num_logits = num_logits
        self._inputs = (
            *rows.inputs,
            idx_mapping,
            num_reqs,
            tokens,
            num_tokens,
            logits,
            num_logits,
            *(output.data_ptr() for output in self.logit_rows),
        )
        self._advanced = (logits, tokens, idx_mapping, num_reqs, *rows.advanced)

    def prepare(self, num_blocks: int) -> tuple[torch.Tensor, ...]:
        """Return what the requests compute next.

        Args:
            num_blocks: columns of the block table.

        Returns:
            input_ids, positions, slot_mapping, sample_positions, seq_lens and
            block_table, as `InputBatch` has them.

        Raises:
            IndexError: a token, a logit row or a block is outside its request's.
        """
        num_tokens, num_reqs = self._num_tokens, self._num_reqs
        outputs = [new(num_tokens, np.int64) for _ in range(3)]
        outputs += (
            new(self._num_logits, np.int64),
            new(num_reqs, np.int32),
            new((num_reqs, num_blocks), np.int32),
        )
        failed = self._c.lay_out_step(
            *self._inputs, num_blocks, *map(torch.Tensor.data_ptr, outputs)
        )
        if failed:
            raise IndexError("a row of the step is outside its request's")
        return tuple(outputs)

    def advance(
        self, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Take the samples over, as `post_update` does.

        Args:
            sampled_token_ids: [num_reqs, width] int64.
            num_sampled: [num_reqs] int32.

        Raises:
            IndexError: there are more samples than width, or fewer than none.
        """
        num_reqs, width = self._num_reqs, sampled_token_ids.shape[1]
        failed = self._c.post_update(
            address_of(sampled_token_ids, (num_reqs, width), torch.int64),
            width,
            address_of(num_sampled, (num_reqs,), torch.int32),
            *self._advanced,
        )
        if failed:
            raise IndexError("a sample is outside the request rows")
