"""Curves of acceptance by score, fitted to what became of drafts."""

import numpy as np

from vllm.v1.worker.gpu.spec_decode.confidence.outcomes import (
    ACCEPTED,
    DRAFTED,
    TRIED,
)
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    PARTS_PER_KNOT,
    ScoreScale,
)

# Drafts at a knot after which its earlier outcomes count half. Drafts that were not
# tried count as well: what is never tried drifts back to what its neighbours say, and
# gets another chance.
HALF_LIFE_DRAFTS = 2048
# Weight of what is believed already, as tried drafts a knot.
_PRIOR_DRAFTS = 8.0
_NUM_NEWTON_STEPS = 12
_MAX_NEWTON_STEP = 1.0
# Logits of probabilities that are told from 0 and 1.
_MAX_LOGIT = 16.0


class OutcomeMemory:
    """Outcomes of drafts, the older ones fading.

    Args:
        num_verifications: ways to verify.
        num_places: drafts of a request.
        scale: of the scores.
    """

    def __init__(
        self, num_verifications: int, num_places: int, scale: ScoreScale
    ) -> None:
        shape = num_verifications, num_places, scale.num_knots
        self._scale = scale
        self._tried = np.zeros(shape)
        self._accepted = np.zeros(shape)

    def add(self, counts: np.ndarray) -> None:
        """Fade what is known and add what is new.

        Args:
            counts: as `count_outcomes` counts.
        """
        drafts = counts.astype(np.float64) / PARTS_PER_KNOT
        kept = 0.5 ** (drafts[..., DRAFTED] / HALF_LIFE_DRAFTS)
        self._tried = self._tried * kept + drafts[..., TRIED]
        self._accepted = self._accepted * kept + drafts[..., ACCEPTED]

    def fit_curves(self) -> np.ndarray:
        """Return [verifications, places, num_knots] float64, logits of acceptance."""
        return fit_curves(self._tried, self._accepted, self._scale.prior_logits)


def fit_curves(
    tried: np.ndarray, accepted: np.ndarray, prior_logits: np.ndarray
) -> np.ndarray:
    """Fit the curve of every place, as far from that of all as its drafts can tell.

    Each fit begins with the curve of the wider group: its logit is stretched and
    shifted, which few drafts can tell, and then bent at each knot, which takes many.

    Args:
        tried: [verifications, places, num_knots] float64, drafts.
        accepted: of its shape, those of them that were accepted.
        prior_logits: [num_knots] float64, the curve before any draft.

    Returns:
        [verifications, places, num_knots] float64, logits of acceptance.

    Source: Platt, "Probabilistic outputs for support vector machines", 1999; Zadrozny
    and Elkan, "Obtaining calibrated probability estimates", ICML 2001.
    """
    logits = np.broadcast_to(prior_logits, (1, 1, len(prior_logits)))
    for axes in ((0, 1), (1,), ()):
        group_tried = tried.sum(axis=axes, keepdims=True)
        group_accepted = accepted.sum(axis=axes, keepdims=True)
        logits = np.broadcast_to(logits, group_tried.shape)
        believed = _PRIOR_DRAFTS * _sigmoid(logits)
        logits = _stretch(
            logits, group_tried + _PRIOR_DRAFTS, group_accepted + believed
        )
        believed = _PRIOR_DRAFTS * _sigmoid(logits)
        probs = (group_accepted + believed) / (group_tried + _PRIOR_DRAFTS)
        logits = np.log(probs) - np.log1p(-probs)
    return logits


def _stretch(logits: np.ndarray, tried: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Return a * logits + b, with the a and b that fit best along the last axis.

    Newton's method for the likelihood; `tried` is above 0 at every knot.
    """
    slope = np.ones(logits.shape[:-1])[..., None]
    shift = np.zeros_like(slope)
    for _ in range(_NUM_NEWTON_STEPS):
        probs = _sigmoid(slope * logits + shift)
        error = accepted - tried * probs
        weight = tried * probs * (1 - probs) + 1e-9
        total = weight.sum(axis=-1, keepdims=True)
        mean = (weight * logits).sum(axis=-1, keepdims=True) / total
        centred = logits - mean
        spread = (weight * centred**2).sum(axis=-1, keepdims=True) + 1e-9
        step = (error * centred).sum(axis=-1, keepdims=True) / spread
        step = step.clip(-_MAX_NEWTON_STEP, _MAX_NEWTON_STEP)
        lift = error.sum(axis=-1, keepdims=True) / total
        lift = lift.clip(-_MAX_NEWTON_STEP, _MAX_NEWTON_STEP)
        slope += step
        shift += lift - step * mean
    return (slope * logits + shift).clip(-_MAX_LOGIT, _MAX_LOGIT)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))
