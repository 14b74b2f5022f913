"""When to draft at all: not while it does not pay, but for a try from time to time."""

import math

# Steps' worth of time, less what was won since, that is lost to drafting when it stops:
# one dear step is enough. A pause ends when anything would be won, but patience comes
# back by what is won indeed: drafts that gain a little and lose more stay off.
_PATIENCE = 0.5
# Steps without drafting before it is tried, and the most they grow to while trying
# changes nothing: a try costs a proposal and a few drafts to verify.
_FIRST_PAUSE = 64
_MAX_PAUSE = 512
# Steps of a pause from one look at what drafts would bring to the next. Prime, so that
# whatever else happens every so many steps is seen in its turn.
_LOOK_INTERVAL = 7


class DraftingSwitch:
    """Counts steps and what they lose: the same ones lead to the same decisions."""

    def __init__(self) -> None:
        # At most the patience.
        self._lost_steps = 0.0
        # Of the last decision.
        self._speedup = 1.0
        self._pause = _FIRST_PAUSE
        self._num_paused = 0
        self._was_try = False

    @property
    def is_testing(self) -> bool:
        """Whether the drafts that this step can verify were proposed as a try."""
        return self._was_try

    @property
    def num_harmless_steps(self) -> float:
        """Steps like the last one that patience has room for; infinite if it won."""
        if self._speedup >= 1.0:
            return math.inf
        return (_PATIENCE - self._lost_steps) / (1.0 - self._speedup)

    def make_for_larger_batch(self) -> "DraftingSwitch":
        """Return a switch for more requests: what was lost with few is lost for it."""
        switch = DraftingSwitch()
        switch._lost_steps = self._lost_steps
        return switch

    def go_on(self) -> None:
        """Count a step that drafts as the last one did, without a decision."""
        self._count(self._speedup)

    def pass_over(self) -> bool:
        """Count a step of a pause without a look at what drafts would bring.

        Returns:
            False if there is no pause, or a look is due: `decide` is to be asked.
        """
        if self._num_paused % _LOOK_INTERVAL == 0 or self._num_paused >= self._pause:
            return False
        self._was_try = False
        self._num_paused += 1
        return True

    def decide(self, speedup: float) -> bool:
        """Say whether to propose drafts at the end of this step.

        Asked once in each step that is not passed over.

        Args:
            speedup: tokens a second that drafts are expected to give, over those
                without any.
        """
        self._was_try = False
        self._speedup = speedup
        self._count(speedup)
        if self._lost_steps < _PATIENCE:
            self._num_paused = 0
            self._pause = _FIRST_PAUSE
            return True
        self._num_paused += 1
        if self._num_paused <= self._pause:
            return False
        self._num_paused = 0
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._was_try = True
        return True

    def _count(self, speedup: float) -> None:
        lost = self._lost_steps + 1.0 - speedup
        self._lost_steps = min(max(lost, 0.0), _PATIENCE)
