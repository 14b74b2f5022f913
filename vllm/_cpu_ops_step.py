"""The compiled operators of a step's bookkeeping and of the verification of drafts.

The twins stand beside the Triton kernels, in the files of these names' public
functions, which say what each argument is. Most are about a few numbers a request: a
call costs microseconds, where a twin's dozen operations on tiny tensors cost fifty.
"""

import itertools
from typing import Any

import numpy as np
import torch


class StepOps:
    """Arguments as those of the twins; checked is what would leave an array."""

    # The C functions by name; ctypes checks their arguments.
    _c: Any

    def gather_rows(
        self, rows: torch.Tensor, idx_mapping: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        (max_num_reqs, width), (num_reqs,) = rows.shape, idx_mapping.shape
        # Any four bytes.
        is_float = rows.dtype is torch.float32
        dtype = torch.float32 if is_float else torch.int32
        gathered = new((num_reqs, num_columns), np.float32 if is_float else np.int32)
        failed = self._c.gather_rows(
            _address(rows, max_num_reqs, dtype),
            max_num_reqs,
            width,
            _address(idx_mapping, num_reqs, torch.int32),
            num_reqs,
            num_columns,
            gathered.data_ptr(),
        )
        if failed:
            raise IndexError(f"{num_columns} columns of rows in {tuple(rows.shape)}")
        return gathered

    def scatter_rows(
        self, values: torch.Tensor, idx_mapping: torch.Tensor, rows: torch.Tensor
    ) -> None:
        (num_reqs, width), max_num_reqs = values.shape, rows.shape[0]
        if rows.shape[1] != width:
            raise ValueError(f"{width} columns for rows in {tuple(rows.shape)}")
        failed = self._c.scatter_rows(
            _address(values, num_reqs, torch.int64),
            width,
            _address(idx_mapping, num_reqs, torch.int32),
            num_reqs,
            _address(rows, max_num_reqs, torch.int64),
            max_num_reqs,
        )
        if failed:
            raise IndexError(f"a request row is not in [0, {max_num_reqs})")

    def compute_slot_mapping(
        self,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        num_reqs, num_blocks = block_table.shape
        (num_tokens,) = positions.shape
        slot_mapping = new(num_tokens, np.int64)
        failed = self._c.compute_slot_mapping(
            _address(block_table, num_reqs, torch.int32),
            num_blocks,
            num_blocks,
            _address(query_start_loc, num_reqs + 1, torch.int32),
            num_reqs,
            _address(positions, num_tokens, torch.int64),
            num_tokens,
            block_size,
            slot_mapping.data_ptr(),
        )
        if failed:
            raise IndexError("a position is outside its request's blocks")
        return slot_mapping

    def find_context_slots(
        self,
        block_rows: torch.Tensor,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        block_size: int,
        max_len: int,
    ) -> torch.Tensor:
        (max_num_reqs, max_blocks), (num_reqs,) = block_rows.shape, idx_mapping.shape
        (num_tokens,) = positions.shape
        slots = new(num_tokens, np.int64)
        failed = self._c.context_slots(
            _address(block_rows, max_num_reqs, torch.int32),
            max_num_reqs,
            max_blocks,
            _address(idx_mapping, num_reqs, torch.int32),
            _address(query_start_loc, num_reqs + 1, torch.int32),
            _address(positions, num_tokens, torch.int64),
            _address(num_computed_tokens, max_num_reqs, torch.int32),
            num_reqs,
            num_tokens,
            block_size,
            max_len,
            slots.data_ptr(),
        )
        if failed:
            raise IndexError("a request or a position has no blocks")
        return slots

    def lay_out_blocks(
        self,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        block_rows: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_blocks: int,
        num_slots: int,
        num_silent: int,
        max_drafts: int,
        mask_token_id: int,
        block_size: int,
        max_len: int,
    ) -> tuple[torch.Tensor, ...]:
        max_num_reqs, max_model_len = all_token_ids.shape
        max_blocks, (num_reqs,) = block_rows.shape[1], idx_mapping.shape
        if num_blocks > max_blocks:
            raise IndexError(f"{num_blocks} of {max_blocks} blocks")
        num_tokens = num_reqs * num_slots
        longs = _new_vectors([num_reqs] * 2 + [num_tokens] * 3, np.int64)
        sizes = [num_reqs + 1, num_reqs, num_reqs, num_reqs * num_blocks]
        ints = _new_vectors(sizes, np.int32)
        *ints, block_table = ints
        outputs = (*longs, *ints, block_table.view(num_reqs, num_blocks))
        failed = self._c.lay_out_blocks(
            _address(all_token_ids, max_num_reqs, torch.int32),
            _address(num_computed_tokens, max_num_reqs, torch.int32),
            _address(block_rows, max_num_reqs, torch.int32),
            _address(idx_mapping, num_reqs, torch.int32),
            max_num_reqs,
            max_model_len,
            max_blocks,
            num_reqs,
            num_slots,
            num_silent,
            max_drafts,
            mask_token_id,
            block_size,
            max_len,
            num_blocks,
            *(output.data_ptr() for output in outputs),
        )
        if failed:
            raise IndexError("a request has no row, or a position no block")
        return outputs

    def add_and_sum(
        self, counts: torch.Tensor, admitted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (num_reqs,) = admitted.shape
        if counts.shape != (2, num_reqs):
            raise ValueError(f"counts of {tuple(counts.shape)} for {num_reqs} requests")
        row_sums = new(num_reqs + 1, np.int32)
        token_sums = new(num_reqs + 1, np.int32)
        self._c.add_and_sum(
            _address(counts, 2, torch.int32),
            _address(admitted, num_reqs, torch.int32),
            num_reqs,
            row_sums.data_ptr(),
            token_sums.data_ptr(),
        )
        return row_sums, token_sums

    def drafts_behind(
        self, input_ids: torch.Tensor, expanded_local_pos: torch.Tensor
    ) -> torch.Tensor:
        (num_logits,) = input_ids.shape
        drafts = new(num_logits, np.int64)
        self._c.drafts_behind(
            _address(input_ids, num_logits, torch.int64),
            _address(expanded_local_pos, num_logits, torch.int32),
            num_logits,
            drafts.data_ptr(),
        )
        return drafts

    def take_accepted_prefix(
        self,
        is_accepted: torch.Tensor,
        token_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        max_rows_per_req: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (num_logits,) = token_ids.shape
        num_reqs = cu_num_logits.shape[0] - 1
        sampled = new((num_reqs, max_rows_per_req), np.int64)
        num_sampled = new(num_reqs, np.int32)
        failed = self._c.take_accepted_prefix(
            _address(is_accepted, num_logits, torch.bool),
            _address(token_ids, num_logits, torch.int64),
            num_logits,
            _address(cu_num_logits, num_reqs + 1, torch.int32),
            num_reqs,
            max_rows_per_req,
            sampled.data_ptr(),
            num_sampled.data_ptr(),
        )
        if failed:
            raise IndexError(f"the requests do not own {num_logits} logit rows")
        return sampled, num_sampled

    def admit_drafts(
        self,
        confidence_probs: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_drafts: torch.Tensor,
        draft_budget: int,
    ) -> torch.Tensor:
        max_num_reqs, max_drafts = confidence_probs.shape
        (num_reqs,) = idx_mapping.shape
        admitted = new(num_reqs, np.int32)
        failed = self._c.admit_drafts(
            _address(confidence_probs, max_num_reqs, torch.float32),
            max_num_reqs,
            max_drafts,
            _address(idx_mapping, num_reqs, torch.int32),
            _address(num_drafts, num_reqs, torch.int32),
            num_reqs,
            draft_budget,
            admitted.data_ptr(),
        )
        if failed:
            raise IndexError("there is no such row, or too few drafts")
        return admitted

    def read_curves(
        self,
        curves: torch.Tensor,
        scores: torch.Tensor,
        num_drafts: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        is_seeded: torch.Tensor,
        is_constrained: torch.Tensor,
        low: float,
        knots_per_unit: float,
        parts: int,
        marks: torch.Tensor,
    ) -> torch.Tensor:
        num_reqs, max_drafts = scores.shape
        (max_num_reqs,), num_kinds = temperature.shape, curves.shape[0]
        if scores.dtype is not torch.float32 or curves.shape[1] != max_drafts:
            raise ValueError(
                f"{tuple(scores.shape)} scores in {scores.dtype} for curves of "
                f"{tuple(curves.shape)}"
            )
        if marks.shape != (max_num_reqs, max_drafts):
            raise ValueError(f"marks of {tuple(marks.shape)}")
        probs = new((num_reqs, max_drafts), np.float32)
        failed = self._c.read_curves(
            # A curve a draft, for each way to verify, with a grammar and without.
            _address(curves, num_kinds, torch.float32),
            scores.data_ptr(),
            *scores.stride(),
            _address(num_drafts, num_reqs, torch.int32),
            _address(idx_mapping, num_reqs, torch.int32),
            num_reqs,
            max_drafts,
            _address(temperature, max_num_reqs, torch.float32),
            _address(is_seeded, max_num_reqs, torch.bool),
            _address(is_constrained, max_num_reqs, torch.bool),
            max_num_reqs,
            num_kinds // 2,
            low,
            knots_per_unit,
            curves.shape[2],
            parts,
            probs.data_ptr(),
            _address(marks, max_num_reqs, torch.int32),
        )
        if failed:
            raise IndexError(f"a request row is not in [0, {max_num_reqs})")
        return probs

    def count_outcomes(
        self,
        counts: torch.Tensor,
        marks: torch.Tensor,
        idx_mapping: torch.Tensor,
        cu_num_logits: torch.Tensor,
        num_sampled: torch.Tensor,
        num_bonus_tokens: int,
        parts: int,
    ) -> None:
        (num_reqs,), (max_num_reqs, num_drafts) = idx_mapping.shape, marks.shape
        failed = self._c.count_outcomes(
            _address(counts, counts.shape[0], torch.int32),
            # Three counts a knot.
            counts.numel() // 3,
            _address(marks, max_num_reqs, torch.int32),
            max_num_reqs,
            num_drafts,
            _address(idx_mapping, num_reqs, torch.int32),
            _address(cu_num_logits, num_reqs + 1, torch.int32),
            _address(num_sampled, num_reqs, torch.int32),
            num_reqs,
            num_bonus_tokens,
            parts,
        )
        if failed:
            raise IndexError("a request row or a mark is outside its array")

    def noise_keys(
        self,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        purpose: int,
        anchor_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (num_keys,) = seeds.shape
        keys = new(num_keys, np.int64)
        anchors = None
        if anchor_positions is not None:
            anchors = _address(anchor_positions, num_keys, torch.int64)
        self._c.noise_keys(
            _address(seeds, num_keys, torch.int64),
            _address(positions, num_keys, torch.int64),
            anchors,
            int(purpose),
            num_keys,
            keys.data_ptr(),
        )
        return keys

    def block_noise_keys(
        self,
        seeds: torch.Tensor,
        is_seeded: torch.Tensor,
        idx_mapping: torch.Tensor,
        anchors: torch.Tensor,
        num_steps: int,
        target_purpose: int,
        draft_purpose: int,
    ) -> torch.Tensor:
        (max_num_reqs,), (num_reqs,) = seeds.shape, idx_mapping.shape
        keys = new((num_steps, num_reqs), np.int64)
        failed = self._c.block_noise_keys(
            _address(seeds, max_num_reqs, torch.int64),
            _address(is_seeded, max_num_reqs, torch.bool),
            max_num_reqs,
            _address(idx_mapping, num_reqs, torch.int32),
            _address(anchors, num_reqs, torch.int64),
            num_reqs,
            num_steps,
            int(target_purpose),
            int(draft_purpose),
            keys.data_ptr(),
        )
        if failed:
            raise IndexError(f"a request row is not in [0, {max_num_reqs})")
        return keys

    def apply_temperature(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
    ) -> None:
        num_logits, vocab_size = logits.shape
        (max_num_reqs,) = temperature.shape
        failed = self._c.apply_temperature(
            *_matrix(logits, vocab_size),
            _address(expanded_idx_mapping, num_logits, torch.int32),
            _address(temperature, max_num_reqs, torch.float32),
            max_num_reqs,
            num_logits,
            vocab_size,
        )
        if failed:
            raise IndexError(f"a request row is not in [0, {max_num_reqs})")

    def greedy_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        num_logits, vocab_size = logits.shape
        token_ids = new(num_logits, np.int64)
        self._c.greedy_argmax(
            *_matrix(logits, vocab_size), num_logits, vocab_size, token_ids.data_ptr()
        )
        return token_ids

    def verify_greedy(
        self,
        token_ids: torch.Tensor,
        input_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        max_rows_per_req: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Judge drafts by the likeliest tokens, as `rejection_sample` does.

        Args:
            token_ids: [num_logits] int64, the likeliest of each row.
            input_ids: [num_logits] int64, of the rows; each the draft that the row
                before it judges, if that is the same request's; -1: not accepted.
            cu_num_logits: [num_reqs + 1] int32.
            max_rows_per_req: drafts + bonus rows.
        """
        num_logits = token_ids.shape[0]
        num_reqs = cu_num_logits.shape[0] - 1
        sampled = new((num_reqs, max_rows_per_req), np.int64)
        num_sampled = new(num_reqs, np.int32)
        failed = self._c.verify_greedy(
            _address(token_ids, num_logits, torch.int64),
            _address(input_ids, num_logits, torch.int64),
            num_logits,
            _address(cu_num_logits, num_reqs + 1, torch.int32),
            num_reqs,
            max_rows_per_req,
            sampled.data_ptr(),
            num_sampled.data_ptr(),
        )
        if failed:
            raise IndexError(f"the requests do not own {num_logits} logit rows")
        return sampled, num_sampled

    def likeliest_tokens(
        self, logits: torch.Tensor, num_candidates: int
    ) -> torch.Tensor:
        num_logits, vocab_size = logits.shape
        ids = new((num_logits, num_candidates), np.int64)
        failed = self._c.likeliest_tokens(
            *_matrix(logits, vocab_size),
            num_logits,
            vocab_size,
            num_candidates,
            ids.data_ptr(),
        )
        if failed:
            raise IndexError(f"{num_candidates} of {vocab_size} tokens")
        return ids

    def accept_drafts(
        self,
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_token_ids: torch.Tensor,
        uniform: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
    ) -> torch.Tensor:
        num_logits, vocab_size = target_logits.shape
        is_accepted = new(num_logits, np.bool_)
        failed = self._c.accept_drafts(
            *_matrix(target_logits, vocab_size),
            *_draft_rows(draft_logits, vocab_size),
            _address(draft_token_ids, num_logits, torch.int64),
            _address(uniform, num_logits, torch.float32),
            _address(expanded_idx_mapping, num_logits, torch.int32),
            _address(expanded_local_pos, num_logits, torch.int32),
            num_logits,
            vocab_size,
            is_accepted.data_ptr(),
        )
        if failed:
            raise IndexError("a draft is outside the vocabulary or the drafts' logits")
        return is_accepted

    def write_residual_logits(
        self,
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor,
        is_rejected: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
    ) -> None:
        num_logits, vocab_size = target_logits.shape
        failed = self._c.write_residual_logits(
            *_matrix(target_logits, vocab_size),
            *_draft_rows(draft_logits, vocab_size),
            _address(is_rejected, num_logits, torch.bool),
            _address(expanded_idx_mapping, num_logits, torch.int32),
            _address(expanded_local_pos, num_logits, torch.int32),
            num_logits,
            vocab_size,
        )
        if failed:
            raise IndexError("a rejected draft is outside the drafts' logits")


def new(shape: int | tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
    """Return a tensor to write to.

    By way of NumPy: once the layers have driven its code out of the caches, torch's own
    allocation takes twice as long, longer than what is then written.
    """
    return torch.from_numpy(np.empty(shape, dtype))


def _new_vectors(sizes: list[int], dtype: type[np.generic]) -> list[torch.Tensor]:
    """Return as many tensors to write to, one behind the other."""
    array = np.empty(sum(sizes), dtype)
    ends = itertools.accumulate(sizes)
    return [
        torch.from_numpy(array[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]


def _matrix(x: torch.Tensor, num_columns: int) -> tuple[int, ...]:
    """Return where float32 rows begin, and their strides."""
    *strides, last = x.stride()
    if x.dtype is not torch.float32 or last != 1 or x.shape[-1] != num_columns:
        raise ValueError(
            f"expected contiguous float32 rows of {num_columns}, got {tuple(x.shape)} "
            f"{x.dtype} with strides {x.stride()}"
        )
    return x.data_ptr(), *strides


def _draft_rows(
    draft_logits: torch.Tensor | None, vocab_size: int
) -> tuple[int | None, ...]:
    """Return where the drafts' distributions are, and their numbers."""
    if draft_logits is None:
        return None, 0, 0, 0, 0
    max_num_reqs, max_drafts, _ = draft_logits.shape
    return *_matrix(draft_logits, vocab_size), max_num_reqs, max_drafts


def _address(x: torch.Tensor, num_rows: int, dtype: torch.dtype) -> int:
    """Return where `num_rows` contiguous rows begin."""
    if x.dtype is not dtype or x.shape[0] != num_rows or not x.is_contiguous():
        raise ValueError(
            f"expected {num_rows} contiguous rows of {dtype}, got {tuple(x.shape)} "
            f"{x.dtype} with strides {x.stride()}"
        )
    return x.data_ptr()
