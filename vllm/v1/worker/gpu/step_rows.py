"""The persistent rows at both ends of a step: its inputs, and what became of them."""

from operator import add

import torch

from vllm import _custom_ops as ops
from vllm._cpu_ops_rows import FusedRows, LaidOutRows, RequestRows, RowLayout
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.batch_layout import BatchLayout
from vllm.v1.worker.gpu.block_table import BlockTable, compute_slot_mapping
from vllm.v1.worker.gpu.input_batch import InputBatch, lay_out_rows, post_update
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.step_requests import StepRequests


class StepRows:
    """Makes the inputs of steps, and moves the rows on behind them.

    On a CPU the compiled operators do each in one call, where they are built.

    Args:
        states: tokens and lengths of the requests.
        block_table: their cache blocks.
    """

    def __init__(self, states: RequestState, block_table: BlockTable) -> None:
        self._states = states
        self._block_table = block_table
        self._fused = _fuse(states, block_table)
        # Of the last layout.
        self._laid_out: tuple[BatchLayout, LaidOutRows] | None = None

    def prepare(
        self, requests: StepRequests, layout: BatchLayout, num_computed: list[int]
    ) -> InputBatch:
        """Return the inputs of a step.

        Args:
            requests: in batch order.
            layout: of their rows.
            num_computed: tokens of each before the step; an upper bound under
                speculation.
        """
        max_seq_len = max(map(add, num_computed, requests.num_tokens))
        idx_mapping = requests.idx_mapping
        rows = self._lay_out(idx_mapping, layout)
        if rows is not None:
            num_blocks = self._block_table.count_blocks(max_seq_len)
            prepared = rows.prepare(num_blocks)
            input_ids, positions, slot_mapping, sample_positions, *lens = prepared
            seq_lens, block_table = lens
            logit_rows = [*rows.logit_rows, sample_positions]
        else:
            input_ids, positions, seq_lens, *logit_rows = lay_out_rows(
                self._states.all_token_ids.gpu,
                self._states.total_len.gpu,
                self._states.draft_tokens,
                self._states.num_computed_tokens.gpu,
                idx_mapping,
                layout,
            )
            block_table = self._block_table.gather(idx_mapping, max_seq_len)
            slot_mapping = compute_slot_mapping(
                block_table,
                layout.query_start_loc,
                positions,
                self._block_table.block_size,
            )
        return InputBatch(
            requests.req_ids,
            requests.scheduled.idx_mapping_np,
            idx_mapping,
            layout,
            max_seq_len,
            num_computed,
            block_table,
            slot_mapping,
            input_ids,
            positions,
            seq_lens,
            *logit_rows,
        )

    def advance(self, batch: InputBatch, sampler_output: SamplerOutput) -> None:
        """Write a step's samples into the rows, and move their lengths on."""
        sampled, num_sampled = (
            sampler_output.sampled_token_ids,
            sampler_output.num_sampled,
        )
        rows = self._lay_out(batch.idx_mapping, batch.layout)
        if rows is not None:
            rows.advance(sampled, num_sampled)
            return
        post_update(
            sampled,
            num_sampled,
            batch.layout,
            batch.idx_mapping,
            self._states.all_token_ids.gpu,
            self._states.total_len.gpu,
            self._states.num_computed_tokens.gpu,
        )

    def _lay_out(
        self, idx_mapping: torch.Tensor, layout: BatchLayout
    ) -> LaidOutRows | None:
        """Return the rows in batch order; None without compiled operators."""
        if self._fused is None:
            return None
        # A layout is of one step's requests, in their order.
        if self._laid_out is None or self._laid_out[0] is not layout:
            rows = RowLayout(
                idx_mapping,
                layout.query_start_loc,
                layout.num_tokens,
                layout.cu_num_logits,
                layout.num_logits,
            )
            self._laid_out = layout, self._fused.lay_out(rows)
        return self._laid_out[1]


def _fuse(states: RequestState, block_table: BlockTable) -> FusedRows | None:
    native = ops.maybe_step_ops()
    if native is None or block_table.rows.is_cuda:
        return None
    rows = RequestRows(
        states.all_token_ids.gpu,
        states.total_len.gpu,
        states.draft_tokens,
        states.num_computed_tokens.gpu,
        block_table.rows,
        block_table.block_size,
    )
    return FusedRows(native, rows)
