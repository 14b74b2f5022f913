"""When to make a step without drafts although they pay: to know what it costs."""

# Speedups up to which what is believed of plain steps decides whether to draft. They
# are not seen while drafting, and inherit from other sizes what is wrong with those.
_DOUBTFUL_SPEEDUP = 1.25
# Drafting steps in front of the first plain one, and the most that they grow to: each
# is worth a few drafts, and teaches less than the one before.
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128


class PlainStepProbe:
    """Counts steps that draft: the same ones lead to the same decisions."""

    def __init__(self) -> None:
        self._num_drafting = 0
        self._interval = _FIRST_INTERVAL

    def go_on(self) -> None:
        """Count a step that drafts."""
        self._num_drafting += 1

    def restart(self) -> None:
        """Count anew: a plain step is made anyway."""
        self._num_drafting = 0

    def take_turn(self, speedup: float) -> bool:
        """Say whether the next step is to be a plain one, and count anew if it is.

        Args:
            speedup: tokens a second that drafts are expected to give, over those
                without any.
        """
        if speedup > _DOUBTFUL_SPEEDUP or self._num_drafting < self._interval:
            return False
        self.restart()
        self._interval = min(2 * self._interval, _MAX_INTERVAL)
        return True
