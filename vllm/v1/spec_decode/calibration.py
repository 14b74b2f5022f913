"""Whether drafts survive as often as they were said to."""

import msgspec
import numpy as np

# Of equal width, over predictions from 0 to 1.
NUM_BINS = 15
# A position with more pairs forgets half of them: the error is that of late.
MAX_PAIRS = 20_000


class CalibrationStats(msgspec.Struct, array_like=True):
    """Sums over pairs of a predicted survival and whether the draft survived.

    Args:
        num_pairs: [num_positions * NUM_BINS], bin by bin of the first position, then of
            the next; likewise the others.
        predicted: sums of predictions.
        happened: survived drafts.
    """

    num_pairs: list[float]
    predicted: list[float]
    happened: list[float]


class Calibration:
    """Predictions beside what happened, in bins, for each place in a proposal.

    A draft survives if it and those before it are accepted. Only a draft that was
    verified tells anything: it has survived or not also if one before it was rejected.

    Args:
        num_positions: drafts that a proposal can have.
    """

    def __init__(self, num_positions: int) -> None:
        # Pairs, sums of predictions, survived drafts.
        self._sums = np.zeros((3, num_positions, NUM_BINS))

    @property
    def num_pairs(self) -> np.ndarray:
        """[num_positions, NUM_BINS] float64."""
        return self._sums[0]

    @property
    def predicted(self) -> np.ndarray:
        """[num_positions, NUM_BINS] float64, sums of predictions."""
        return self._sums[1]

    @property
    def happened(self) -> np.ndarray:
        """[num_positions, NUM_BINS] float64, survived drafts."""
        return self._sums[2]

    def observe(
        self, survivals: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Take what became of some proposals.

        Args:
            survivals: [num_proposals, num_positions] predicted, NaN where nothing was.
            num_verified: [num_proposals] leading drafts that were put to the test.
            num_accepted: [num_proposals] leading drafts that passed.
        """
        positions = np.arange(survivals.shape[1])
        is_verified = positions < num_verified[:, None]
        is_verified &= ~np.isnan(survivals)
        predicted = survivals[is_verified].astype(np.float64)
        survived = (positions < num_accepted[:, None])[is_verified]
        bins = np.clip((predicted * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
        bins += np.nonzero(is_verified)[1] * NUM_BINS
        for sums, weights in zip(self._sums, (None, predicted, survived), strict=True):
            counts = np.bincount(bins, weights, minlength=sums.size)
            sums += counts.reshape(sums.shape)

    def add(self, stats: CalibrationStats) -> None:
        """Count another's pairs too, and forget old ones."""
        reported = np.array([stats.num_pairs, stats.predicted, stats.happened])
        self._sums += reported.reshape(self._sums.shape)
        self._sums[:, self.num_pairs.sum(axis=1) > MAX_PAIRS] /= 2

    def take_stats(self) -> CalibrationStats | None:
        """Return the pairs since the last call; None if there are none."""
        if not self.num_pairs.any():
            return None
        stats = CalibrationStats(*self._sums.reshape(3, -1).tolist())
        self._sums[:] = 0
        return stats

    def errors(self) -> list[float | None]:
        """Return the expected calibration error of each place; None without pairs."""
        return [compute_ece(*sums) for sums in self._sums.swapaxes(0, 1)]

    def pooled_error(self) -> float | None:
        """Return the error over all places together; None without pairs."""
        return compute_ece(*self._sums.sum(axis=1))


def compute_ece(
    num_pairs: np.ndarray, predicted: np.ndarray, happened: np.ndarray
) -> float | None:
    """Return the mean distance of prediction and truth over bins, by their pairs.

    Args:
        num_pairs: [num_bins].
        predicted: [num_bins], sums.
        happened: [num_bins], sums.

    Returns:
        From 0 to 1; None without pairs.
    """
    total = num_pairs.sum()
    return float(np.abs(predicted - happened).sum() / total) if total else None
