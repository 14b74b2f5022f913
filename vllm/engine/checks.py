"""Checks of single values that a user has set."""

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.suggestions import did_you_mean


def invalid(parameter: str, must: str, value: Any) -> VLLMValidationError:
    """Return the error that says what a parameter must be, and what it is."""
    return VLLMValidationError(
        f"{parameter} {must}, got {value!r}", parameter=parameter, value=value
    )


def check_choice(parameter: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is none of `choices`; the closest one is named."""
    if value not in choices:
        names = ", ".join(map(str, choices))
        hint = did_you_mean(str(value), map(str, choices))
        raise VLLMValidationError(
            f"{parameter} must be one of {names}, got {value!r}{hint}",
            parameter=parameter,
            value=value,
        )


def check_minimum(parameter: str, value: int | None, minimum: int) -> None:
    """Refuse a value below `minimum`; None means that it is left open."""
    if value is not None and value < minimum:
        raise invalid(parameter, f"must be at least {minimum}", value)
