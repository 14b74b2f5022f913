"""Numbers as people write them: 32K tokens, 1.5G bytes."""

import re
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_human_int(text: str) -> int:
    """Read an integer with an optional suffix.

    An upper-case suffix is binary (32K = 32,768), a lower-case one decimal (25.6k =
    25,600).

    Args:
        text: digits, an optional decimal part, one of k, m, g, t in either case.

    Raises:
        ValueError: the text is no such number, or not a whole one.
    """
    match = _QUANTITY.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(f"not an integer such as 4096, 32K or 25.6k: {text!r}")
    digits, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    value = Decimal(digits) * base ** _POWERS.get(suffix.lower(), 0)
    if value != value.to_integral_value():
        raise ValueError(f"not a whole number: {text!r}")
    return int(value)
