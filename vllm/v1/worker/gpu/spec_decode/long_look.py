"""When to propose all drafts that can be although fewer pay: to know what they are."""

import math

# Of the time of steps with short proposals, for long ones in their place.
_SHARE = 0.01


class LongLook:
    """Saves time for a long proposal, of which the first is free."""

    def __init__(self) -> None:
        self._saved_ms = math.inf

    def save(self, step_ms: float) -> None:
        """Count a step with a short proposal."""
        self._saved_ms += _SHARE * step_ms

    def take_turn(self, price_ms: float) -> bool:
        """Say whether the next proposal is to be a long one, and pay for it.

        Args:
            price_ms: what it costs more than a short one.
        """
        if self._saved_ms < price_ms:
            return False
        self._saved_ms = 0.0
        return True
