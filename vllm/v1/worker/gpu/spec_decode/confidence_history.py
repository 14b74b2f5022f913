"""How sure the drafter was: of the drafts at hand, on the device; of past ones, here.

A draft's own confidence may rank it, but must not set how many drafts are verified: the
budget would then know, from the confidences behind a drawn draft, what was drawn.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from vllm import _custom_ops as ops
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts

# A batch this large tells about the next one by a single round of drafts; fewer
# requests are looked at over several rounds.
_NUM_SAMPLED_REQS = 32
_MAX_ROUNDS = 8
# Steps between the first and the last round that are looked at together: what was
# before a pause in drafting says little about what is behind it.
_MAX_AGE = 2 * _MAX_ROUNDS
# Proposals over which what is typical is averaged, and how many the first guess counts
# for: a batch that believes in each draft would verify all of them before it knows.
_NUM_TYPICAL_PROPOSALS = 256
_NUM_GUESSED_PROPOSALS = 4
_GUESSED_CONFIDENCE = 0.6


@dataclass
class _Round:
    """One proposal round, whose confidences are on their way to the host.

    Args:
        slot: where they are.
        step: when it was proposed; -1: never.
        idx_mapping_np: [num_reqs] int32, the rows that were drafted for.
        is_counted: its confidences are in the typical ones.
    """

    slot: int
    step: int
    idx_mapping_np: np.ndarray
    is_counted: bool = False


class ConfidenceHistory:
    """Confidences by request row: live ones on the device, past ones on the host.

    The copies to the host are not waited for: a round is read when the results of a
    later step have been.

    Args:
        max_num_reqs: rows.
        num_speculative_tokens: drafts of a row.
        device: where drafts are proposed.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_tokens: int, device: torch.device
    ) -> None:
        shape = (max_num_reqs, num_speculative_tokens)
        self._live = StagedWriteTensor(shape, torch.float32, device)
        self._num_tokens = num_speculative_tokens
        self._tenants_np = np.zeros(max_num_reqs, dtype=np.int64)
        self._tenants = torch.from_numpy(self._tenants_np)
        self._step = 0
        # One of them is always too young to be read.
        num_slots = _MAX_ROUNDS + 1
        nobody = np.zeros(0, dtype=np.int32)
        # In the order of their steps.
        self._rounds = deque(_Round(slot, -1, nobody) for slot in range(num_slots))
        # [num_slots, max_num_reqs, num_speculative_tokens] float32, by request row; NaN
        # where nothing was drafted.
        self._past = torch.zeros(num_slots, *shape, pin_memory=device.type != "cpu")
        # [num_slots, max_num_reqs] whose rows they were.
        self._past_tenants = torch.from_numpy(
            np.zeros((num_slots, max_num_reqs), dtype=np.int64)
        )
        # What is typical, and of how many proposals: [num_speculative_tokens] each.
        self._typical_np = np.empty(num_speculative_tokens)
        self._typical = torch.from_numpy(self._typical_np)
        self._num_counted = torch.from_numpy(
            np.empty(num_speculative_tokens, dtype=np.int64)
        )
        self.forget()

    @property
    def live(self) -> torch.Tensor:
        """[max_num_reqs, num_speculative_tokens] float32: of the last proposals."""
        return self._live.gpu

    def forget(self) -> None:
        """Go back to the first guess of what the drafter thinks."""
        for entry in self._rounds:
            entry.step = -1
        self._typical.fill_(_GUESSED_CONFIDENCE)
        self._num_counted.fill_(_NUM_GUESSED_PROPOSALS)

    def add_request(self, req_state_idx: int) -> None:
        """Forget what is known of the row: it is another request's now."""
        self._tenants_np[req_state_idx] += 1
        unknown = np.full(self._num_tokens, np.nan, dtype=np.float32)
        self._live.stage_write(req_state_idx, 0, unknown)

    def apply_staged_writes(self) -> None:
        """Make what was forgotten known to the device."""
        self._live.apply_write()

    def begin_step(self) -> None:
        """Count a step; the results of the one before it have been waited for."""
        self._step += 1

    def record(
        self, idx_mapping_np: np.ndarray, idx_mapping: torch.Tensor, drafts: Drafts
    ) -> None:
        """Take the confidences of a proposal.

        Args:
            idx_mapping_np: [num_reqs] int32.
            idx_mapping: the same on the device.
            drafts: of these requests.
        """
        oldest = self._rounds.popleft()
        record = _record_round_torch
        native = ops.maybe_budget_ops()
        if native is not None and not idx_mapping.is_cuda:
            record = native.record_round
        record(
            drafts.confidence_probs,
            drafts.num_drafts,
            idx_mapping,
            self.live,
            self._tenants,
            oldest.slot,
            self._past,
            self._past_tenants,
        )
        self._rounds.append(_Round(oldest.slot, self._step, idx_mapping_np))

    def get_past_confidences(self, idx_mapping_np: np.ndarray) -> np.ndarray:
        """Return what the drafter thought before, for each of the requests.

        Several rounds stand for what the next one may be like: one proposal says little
        about the request's next, but a mean over proposals would hide how much they
        differ. What a round does not know of a request is what the others do, or else
        what is typical.

        Args:
            idx_mapping_np: [num_reqs] int32.

        Returns:
            [num_rounds, num_reqs, num_speculative_tokens] float64 in [0, 1]; none of
            them of the drafts that this step verifies.
        """
        num_reqs = len(idx_mapping_np)
        num_rounds = min(max(_NUM_SAMPLED_REQS // max(num_reqs, 1), 1), _MAX_ROUNDS)
        slots = [entry.slot for entry in self._list_past_rounds()[-num_rounds:]]
        if not slots:
            return np.tile(self._typical_np, (1, num_reqs, 1))
        native = ops.maybe_budget_ops()
        read = _read_rounds_numpy if native is None else native.read_rounds
        return read(
            self._past,
            self._past_tenants,
            self._tenants,
            self._typical,
            slots,
            idx_mapping_np,
        )

    def _list_past_rounds(self) -> list[_Round]:
        """Return the rounds that can be read, without those of long ago, in order."""
        # Those of the step before are verified in this one, and still on their way.
        rounds = [entry for entry in self._rounds if 0 <= entry.step < self._step - 1]
        for entry in rounds:
            if not entry.is_counted:
                self._count(entry)
        return [entry for entry in rounds if entry.step >= rounds[-1].step - _MAX_AGE]

    def _count(self, entry: _Round) -> None:
        """Let a round move what is typical."""
        entry.is_counted = True
        native = ops.maybe_budget_ops()
        count = _count_round_numpy if native is None else native.count_round
        count(
            self._past,
            self._past_tenants,
            self._tenants,
            entry.slot,
            entry.idx_mapping_np,
            _NUM_TYPICAL_PROPOSALS,
            self._typical,
            self._num_counted,
        )


def _record_round_torch(
    confidence_probs: torch.Tensor,
    num_drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    live: torch.Tensor,
    tenants: torch.Tensor,
    slot: int,
    rounds: torch.Tensor,
    round_tenants: torch.Tensor,
) -> None:
    """Write the confidences of a proposal into their rows, and keep all rows.

    Args:
        confidence_probs: [num_reqs, num_speculative_tokens] float32.
        num_drafts: [num_reqs] int32.
        idx_mapping: [num_reqs] int32.
        live: [max_num_reqs, num_speculative_tokens] float32, changed in place.
        tenants: [max_num_reqs] int64, whose the rows are; on the host, as what follows.
        slot: where the round is kept.
        rounds: [num_slots, max_num_reqs, num_speculative_tokens] float32, changed in
            place; not waited for.
        round_tenants: [num_slots, max_num_reqs] int64, changed in place.
    """
    positions = torch.arange(live.shape[1], device=live.device)
    is_none = positions >= num_drafts.unsqueeze(1)
    # NaN says from here on that there was no draft.
    live[idx_mapping.long()] = confidence_probs.masked_fill(is_none, float("nan"))
    rounds[slot].copy_(live, non_blocking=True)
    round_tenants[slot].copy_(tenants)


def _read_rounds_numpy(
    rounds: torch.Tensor,
    round_tenants: torch.Tensor,
    tenants: torch.Tensor,
    typical: torch.Tensor,
    slots: list[int],
    idx_mapping_np: np.ndarray,
) -> np.ndarray:
    """Return the confidences of some rows in some rounds.

    Args:
        rounds: [num_slots, max_num_reqs, num_speculative_tokens] float32.
        round_tenants: [num_slots, max_num_reqs] int64, whose the rows were.
        tenants: [max_num_reqs] int64, whose they are.
        typical: [num_speculative_tokens] float64, for what no round knows.
        slots: of the rounds.
        idx_mapping_np: [num_reqs] int32, the rows.

    Returns:
        [len(slots), num_reqs, num_speculative_tokens] float64 in [0, 1].
    """
    places = np.array(slots)[:, None], idx_mapping_np
    values = rounds.numpy()[places].clip(0.0, 1.0)
    is_own = round_tenants.numpy()[places] == tenants.numpy()[idx_mapping_np]
    is_known = is_own[:, :, None] & ~np.isnan(values)
    num_known = is_known.sum(axis=0)
    sums = np.where(is_known, values, 0.0).astype(np.float64).sum(axis=0)
    means = np.where(num_known > 0, sums / np.maximum(num_known, 1), typical.numpy())
    return np.where(is_known, values, means)


def _count_round_numpy(
    rounds: torch.Tensor,
    round_tenants: torch.Tensor,
    tenants: torch.Tensor,
    slot: int,
    idx_mapping_np: np.ndarray,
    max_counted: int,
    typical: torch.Tensor,
    num_counted: torch.Tensor,
) -> None:
    """Let a round move what is typical.

    Args:
        rounds: [num_slots, max_num_reqs, num_speculative_tokens] float32.
        round_tenants: [num_slots, max_num_reqs] int64, whose the rows were.
        tenants: [max_num_reqs] int64, whose they are.
        slot: of the round.
        idx_mapping_np: [num_reqs] int32, the rows that were drafted for.
        max_counted: proposals over which what is typical is averaged.
        typical: [num_speculative_tokens] float64, changed in place.
        num_counted: [num_speculative_tokens] int64, changed in place.
    """
    values = rounds.numpy()[slot, idx_mapping_np].clip(0.0, 1.0)
    owners = round_tenants.numpy()[slot, idx_mapping_np]
    is_own = owners == tenants.numpy()[idx_mapping_np]
    is_known = is_own[:, None] & ~np.isnan(values)
    num_known = is_known.sum(axis=0)
    sums = np.where(is_known, values, 0.0).sum(axis=0)
    typical_np, counted_np = typical.numpy(), num_counted.numpy()
    counted = np.minimum(counted_np + num_known, max_counted)
    np.maximum(counted, num_known, out=counted_np)
    typical_np += (sums - num_known * typical_np) / counted_np
