"""How likely a draft is accepted, learnt from those that were.

A confidence is a function of a score that is known before the draft is drawn, and of
what became of drafts in earlier steps. It never depends on the draft that it is about.
"""

import numpy as np
import torch

from vllm.v1.worker.gpu.batch_layout import BatchLayout
from vllm.v1.worker.gpu.buffer_utils import HostSnapshot, to_device
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.confidence.calibration import OutcomeMemory
from vllm.v1.worker.gpu.spec_decode.confidence.curves import read_curves
from vllm.v1.worker.gpu.spec_decode.confidence.outcomes import (
    NUM_OUTCOMES,
    count_outcomes,
)
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    NUM_KINDS,
    ScoreScale,
    Verification,
)

# Steps with drafts up to the first fit, and from one fit to the next at the most: in
# between their number doubles from fit to fit.
FIRST_REFIT = 8
MAX_REFIT_INTERVAL = 64
# Such steps after which the counts that were sent to the host are read there.
_READ_AFTER = 2


class ConfidenceEstimator:
    """Turns the scores of drafts into probabilities of their acceptance.

    Args:
        scale: what a score means.
        max_num_reqs: rows.
        num_speculative_tokens: drafts of a row.
        sampling_states: how the requests' drafts are verified.
        device: where the drafts are.
    """

    def __init__(
        self,
        scale: ScoreScale,
        max_num_reqs: int,
        num_speculative_tokens: int,
        sampling_states: SamplingStates,
        device: torch.device,
    ) -> None:
        self._scale = scale
        self._states = sampling_states
        self._device = device
        # Of the last proposals, by request row; -1 for no draft, or one that was
        # counted.
        self._marks = torch.empty(
            (max_num_reqs, num_speculative_tokens), dtype=torch.int32, device=device
        )
        shape = (
            NUM_KINDS,
            num_speculative_tokens,
            scale.num_knots,
            NUM_OUTCOMES,
        )
        self._counts = torch.empty(shape, dtype=torch.int32, device=device)
        self._snapshot = HostSnapshot(shape, torch.int32, device)
        self.forget()

    def forget(self) -> None:
        """Go back to what is believed of any drafter of this kind."""
        self._marks.fill_(-1)
        self._counts.zero_()
        num_places = self._counts.shape[1]
        # Of drafts that only the model judges, and of those that a grammar does too:
        # what it refuses says nothing of the others.
        self._memories = [
            OutcomeMemory(len(Verification), num_places, self._scale)
            for _ in range(NUM_KINDS // len(Verification))
        ]
        self._num_observed, self._next_refit = 0, FIRST_REFIT
        self._refit()

    def estimate(
        self, scores: torch.Tensor, idx_mapping: torch.Tensor, num_drafts: torch.Tensor
    ) -> torch.Tensor:
        """Return the confidences of new drafts, and remember their marks.

        Args:
            scores: [num_reqs, num_speculative_tokens] float32; NaN for a draft of a
                drafter that failed. A score must not depend on its draft.
            idx_mapping: [num_reqs] int32, batch_idx -> request row.
            num_drafts: [num_reqs] int32.

        Returns:
            [num_reqs, num_speculative_tokens] float32: the probability that a draft is
            accepted if those before it are; 0 where there is no draft.
        """
        return read_curves(
            self._curves,
            scores,
            num_drafts,
            idx_mapping,
            self._states.temperature.gpu,
            self._states.is_seeded.gpu,
            self._states.is_constrained.gpu,
            self._scale,
            self._marks,
        )

    def observe(
        self, layout: BatchLayout, idx_mapping: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Learn from a step that had drafts, before the next ones are proposed.

        Args:
            layout: of the step; the device knows which drafts were verified.
            idx_mapping: [num_reqs] int32.
            num_sampled: [num_reqs] int32.
        """
        count_outcomes(
            self._counts,
            self._marks,
            idx_mapping,
            layout.cu_num_logits,
            num_sampled,
            layout.num_bonus_tokens,
        )
        self._num_observed += 1
        if self._num_observed == self._next_refit:
            self._snapshot.take(self._counts)
            self._counts.zero_()
        elif self._num_observed == self._next_refit + _READ_AFTER:
            counts = np.split(self._snapshot.np, len(self._memories))
            for memory, its_counts in zip(self._memories, counts, strict=True):
                memory.add(its_counts)
            self._refit()
            self._next_refit += min(self._next_refit, MAX_REFIT_INTERVAL)

    def _refit(self) -> None:
        curves = np.concatenate([memory.fit_curves() for memory in self._memories])
        self._curves = to_device(curves.astype("float32"), self._device)
