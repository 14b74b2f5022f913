"""Context that a drafter has not read yet, while nothing is drafted from it."""

from vllm._cpu_ops_drafter import ContextPiece


class ContextQueue:
    """Collects context, since to read a few tokens costs as much as to read one.

    Args:
        max_tokens: so many are enough.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pieces: list[ContextPiece] = []
        self._num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to take what is there."""
        return self._num_tokens >= self._max_tokens

    def add(self, piece: ContextPiece) -> None:
        """Append the tokens of a step."""
        self._pieces.append(piece)
        # Those that are not to be written included: their states are kept as well.
        self._num_tokens += len(piece.positions)

    def take(self) -> list[ContextPiece]:
        """Return all that was added, in its order."""
        pieces, self._pieces, self._num_tokens = self._pieces, [], 0
        return pieces
