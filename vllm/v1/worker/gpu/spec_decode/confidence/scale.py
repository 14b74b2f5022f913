"""What a draft's score means: where its curve has knots, and how it is verified."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

# Parts of the distance between two knots. Where a draft stands between them is a whole
# number of these, so that sums over drafts do not depend on their order.
PARTS_PER_KNOT = 256


class Verification(IntEnum):
    """How a request's drafts are judged, by which their acceptance differs.

    A named seed counts where a token is drawn at all.
    """

    GREEDY = 0
    STANDARD = 1
    COUPLED = 2


# Each without a grammar, then each under one, which may refuse any draft.
NUM_KINDS = 2 * len(Verification)


@dataclass(frozen=True)
class ScoreScale:
    """The scores of one kind of drafter.

    Args:
        low: score of the first knot; lower scores count as it.
        high: score of the last knot; higher ones count as that.
        num_knots: at least 2, at equal distances.
        slope: of the logit of acceptance by the score, until drafts have been judged.
        intercept: that logit at a score of 0, until then.
    """

    low: float
    high: float
    num_knots: int
    slope: float
    intercept: float

    @property
    def knots_per_unit(self) -> float:
        """Knots in a distance of 1."""
        return (self.num_knots - 1) / (self.high - self.low)

    @property
    def prior_logits(self) -> np.ndarray:
        """[num_knots] float64: logits of acceptance that nothing is known about."""
        knots = np.linspace(self.low, self.high, self.num_knots)
        return self.slope * knots + self.intercept


# Logits of a confidence head, as the checkpoint's temperatures left them.
HEAD_LOGITS = ScoreScale(low=-8.0, high=8.0, num_knots=17, slope=1.0, intercept=0.0)
# Of a drafter without such a head, as `compute_certainty` says. Between two models of
# one family acceptance began at 0.7 and 0.3.
CERTAINTIES = ScoreScale(low=-5.0, high=10.0, num_knots=16, slope=0.7, intercept=0.3)
# Binary logarithms of the numbers of tokens in which two places of a text agree.
MATCH_LENGTHS = ScoreScale(low=0.0, high=5.0, num_knots=11, slope=0.6, intercept=-0.8)
