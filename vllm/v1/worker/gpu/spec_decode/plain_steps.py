"""When to make a step without drafts although they pay: to know what it costs."""

# Speedups up to which what is believed of plain steps decides whether to draft. They
# are not seen while drafting, and inherit from other sizes what is wrong with those.
_DOUBTFUL_SPEEDUP = 1.25
# Drafting steps in front of the first plain ones, and the most that they grow to: plain
# steps are worth a few drafts, and teach less than those before.
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128
# In a row: the first verifies drafts still, and with the last drafting begins. What is
# between is a step like those of a pause, whose code and layouts are at hand.
_NUM_PLAIN = 3


class PlainStepProbe:
    """Counts steps that draft: the same ones lead to the same decisions."""

    def __init__(self) -> None:
        self._num_drafting = 0
        self._interval = _FIRST_INTERVAL
        self._num_left = 0

    def go_on(self) -> None:
        """Count a step that drafts."""
        self._num_drafting += 1

    def restart(self) -> None:
        """Count anew: a plain step is made anyway."""
        self._num_drafting = self._num_left = 0

    def take_turn(self, speedup: float) -> bool:
        """Say whether no drafts are to be proposed, and count anew behind such steps.

        Args:
            speedup: tokens a second that drafts are expected to give, over those
                without any.
        """
        if self._num_left > 0:
            self._num_left -= 1
            return True
        if speedup > _DOUBTFUL_SPEEDUP or self._num_drafting < self._interval:
            return False
        self.restart()
        self._interval = min(2 * self._interval, _MAX_INTERVAL)
        self._num_left = _NUM_PLAIN - 1
        return True
