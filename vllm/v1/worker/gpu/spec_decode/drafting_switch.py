"""When to draft at all: not while it does not pay, but for a try from time to time."""

# Steps' worth of time in a row that may be lost to drafting before it stops: one odd
# batch shall not stop it, and one dear step shall be enough.
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
        self._lost_steps = 0.0
        self._pause = _FIRST_PAUSE
        self._num_paused = 0
        self._was_try = False

    @property
    def is_testing(self) -> bool:
        """Whether the drafts that this step can verify were proposed as a try."""
        return self._was_try

    @property
    def is_content(self) -> bool:
        """Whether no time is counted as lost."""
        return self._lost_steps == 0.0

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
        if speedup > 1.0:
            self._lost_steps, self._num_paused = 0.0, 0
            self._pause = _FIRST_PAUSE
            return True
        if self._lost_steps < _PATIENCE:
            self._lost_steps += 1.0 - speedup
            return True
        self._num_paused += 1
        if self._num_paused <= self._pause:
            return False
        self._num_paused = 0
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._was_try = True
        return True
