"""What somebody probably meant who wrote an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the closest known name, or an empty string."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""
