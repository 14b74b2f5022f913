"""When to draft at all: not while it does not pay, but for a try from time to time."""

# Steps in a row that drafting has to be no gain for before it stops: one odd batch
# shall not stop it.
_PATIENCE = 8
# Steps without drafting before it is tried, and the most they grow to while trying
# changes nothing: a try costs a proposal and a few drafts to verify.
_FIRST_PAUSE = 32
_MAX_PAUSE = 512


class DraftingSwitch:
    """Counts steps, and nothing else: the same steps lead to the same decisions."""

    def __init__(self) -> None:
        self._num_no_gain = 0
        self._pause = _FIRST_PAUSE
        self._num_paused = 0
        self._was_try = False

    @property
    def is_testing(self) -> bool:
        """Whether the drafts that this step can verify were proposed as a try."""
        return self._was_try

    def decide(self, pays: bool) -> bool:
        """Say whether to propose drafts at the end of this step; asked once a step.

        Args:
            pays: whether they are expected to give more tokens a second than none.
        """
        self._was_try = False
        if pays:
            self._num_no_gain, self._num_paused = 0, 0
            self._pause = _FIRST_PAUSE
            return True
        self._num_no_gain += 1
        if self._num_no_gain <= _PATIENCE:
            return True
        self._num_paused += 1
        if self._num_paused <= self._pause:
            return False
        self._num_paused = 0
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._was_try = True
        return True
