"""Seeds that follow from other seeds, as plain integers, without torch."""

import hashlib

_MASK64 = 2**64 - 1
_MASK63 = 2**63 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of child `index` of a request with `seed`.

    Args:
        seed: of the parent, a signed 64-bit integer.
        index: place of the child among the parent's n; child 0 keeps the seed, so that
            it says what the request would say with n = 1.

    Returns:
        A signed 64-bit integer; not negative for every index but 0.
    """
    if index == 0:
        return seed
    mixed = _mix64(_mix64((seed + _GOLDEN_GAMMA) & _MASK64) + index * _GOLDEN_GAMMA)
    return mixed & _MASK63


def request_seed(engine_seed: int, req_id: str) -> int:
    """Return the seed of a request that has none, the same after a preemption.

    Args:
        engine_seed: of the process: drawn at start, or configured.
        req_id: of the request.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(f"{engine_seed}:{req_id}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") & _MASK63


def _mix64(value: int) -> int:
    """Return splitmix64's output function of a 64-bit word.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014.
    """
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
