"""How sure the drafter was: of the drafts at hand, on the device; of past ones, here.

A draft's own confidence may rank it, but must not set how many drafts are verified: the
budget would then know, from the confidences behind a drawn draft, what was drawn.
"""

from dataclasses import dataclass

import numpy as np
import torch

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
        self._step = 0
        # One of them is always too young to be read.
        num_slots = _MAX_ROUNDS + 1
        nobody = np.zeros(0, dtype=np.int32)
        self._rounds = [_Round(slot, -1, nobody) for slot in range(num_slots)]
        # [num_slots, max_num_reqs, num_speculative_tokens] float32, by request row; NaN
        # where nothing was drafted.
        self._past = torch.zeros(num_slots, *shape, pin_memory=device.type != "cpu")
        self._past_np: np.ndarray = self._past.numpy()
        # [num_slots, max_num_reqs] whose rows they were.
        self._past_tenants_np = np.zeros((num_slots, max_num_reqs), dtype=np.int64)
        self.forget()

    @property
    def live(self) -> torch.Tensor:
        """[max_num_reqs, num_speculative_tokens] float32: of the last proposals."""
        return self._live.gpu

    def forget(self) -> None:
        """Go back to the first guess of what the drafter thinks."""
        for entry in self._rounds:
            entry.step = -1
        # [num_speculative_tokens] each.
        self._typical_np = np.full(self._num_tokens, _GUESSED_CONFIDENCE)
        self._num_counted_np = np.full(self._num_tokens, _NUM_GUESSED_PROPOSALS)

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
        positions = torch.arange(self._num_tokens, device=idx_mapping.device)
        is_none = positions >= drafts.num_drafts.unsqueeze(1)
        # NaN says from here on that there was no draft.
        known = drafts.confidence_probs.masked_fill(is_none, float("nan"))
        self.live[idx_mapping.long()] = known
        oldest = min(self._rounds, key=lambda entry: entry.step)
        self._past[oldest.slot].copy_(self.live, non_blocking=True)
        self._past_tenants_np[oldest.slot] = self._tenants_np
        oldest.idx_mapping_np = idx_mapping_np
        oldest.step, oldest.is_counted = self._step, False

    def get_past_confidences(self, idx_mapping_np: np.ndarray) -> np.ndarray:
        """Return what the drafter thought before, for each of the requests.

        Several rounds stand for what the next one may be like: one proposal says little
        about the request's next, but a mean over proposals would hide how much they
        differ. What is not known of a request is what is typical.

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
        past = self._read(slots, idx_mapping_np)
        return np.where(np.isnan(past), self._typical_np, past)

    def _list_past_rounds(self) -> list[_Round]:
        """Return the rounds that can be read, without those of long ago, in order."""
        # Those of the step before are verified in this one, and still on their way.
        rounds = [entry for entry in self._rounds if 0 <= entry.step < self._step - 1]
        rounds.sort(key=lambda entry: entry.step)
        for entry in rounds:
            self._count(entry)
        return [entry for entry in rounds if entry.step >= rounds[-1].step - _MAX_AGE]

    def _read(self, slots: list[int], idx_mapping_np: np.ndarray) -> np.ndarray:
        """Return the confidences of the rows, NaN where they were not the request's.

        Returns:
            [num_slots, num_reqs, num_speculative_tokens] float32.
        """
        places = np.array(slots)[:, None], idx_mapping_np
        values = self._past_np[places].clip(0.0, 1.0)
        is_other = self._past_tenants_np[places] != self._tenants_np[idx_mapping_np]
        values[is_other] = np.nan
        return values

    def _count(self, entry: _Round) -> None:
        """Let a round move what is typical, once."""
        if entry.is_counted:
            return
        entry.is_counted = True
        (values,) = self._read([entry.slot], entry.idx_mapping_np)
        is_known = ~np.isnan(values)
        num_known = is_known.sum(axis=0)
        sums = np.where(is_known, values, 0.0).sum(axis=0)
        counted = np.minimum(self._num_counted_np + num_known, _NUM_TYPICAL_PROPOSALS)
        self._num_counted_np = np.maximum(counted, num_known)
        self._typical_np += (sums - num_known * self._typical_np) / self._num_counted_np
