"""Context that a drafter has not read yet, while nothing is drafted from it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """Tokens that the target has computed.

    Args:
        taps: [num_tokens, target_hidden_size] each, the target's states.
        positions: [num_tokens] int64, as the drafter rotates by them.
        slot_mapping: [num_tokens] int64; -1 for a token that is not to be written.
    """

    taps: list[torch.Tensor]
    positions: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Those that are not to be written included."""
        return len(self.positions)


class ContextQueue:
    """Collects context, since to read a few tokens costs as much as to read one.

    Args:
        max_tokens: so many are enough.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pieces: list[Context] = []
        self._num_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._pieces

    @property
    def is_full(self) -> bool:
        """Whether it is time to take what is there."""
        return self._num_tokens >= self._max_tokens

    def add(self, context: Context) -> None:
        """Append the tokens of a step."""
        self._pieces.append(context)
        self._num_tokens += context.num_tokens

    def take(self) -> Context:
        """Return all that was added, as if it had been written step after step."""
        pieces, self._pieces, self._num_tokens = self._pieces, [], 0
        if len(pieces) == 1:
            return pieces[0]
        taps = zip(*(piece.taps for piece in pieces), strict=True)
        slots = torch.cat([piece.slot_mapping for piece in pieces])
        return Context(
            [torch.cat(parts) for parts in taps],
            torch.cat([piece.positions for piece in pieces]),
            _drop_overwritten(slots),
        )


def _drop_overwritten(slots: torch.Tensor) -> torch.Tensor:
    """Return the slots with -1 in place of all but the last of equal ones.

    A block that was freed may belong to another request by now.
    """
    ordered, order = slots.sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return torch.empty_like(slots).scatter_(0, order, ordered.masked_fill(~is_last, -1))
