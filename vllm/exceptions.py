"""Errors that cross module borders: wrong input, and what this set-up cannot do."""

from typing import Any


class VLLMValidationError(ValueError):
    """A value that a user sent cannot be served; the message says what to change.

    Args:
        message: one sentence for the user, without internals or file paths.
        parameter: the request field or flag that is wrong.
        value: the offending value, for logs only.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: Any = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value


class UnsupportedError(RuntimeError):
    """A model, device or option that this build cannot serve; raised at start-up."""


class CheckpointError(UnsupportedError):
    """A checkpoint that is missing, truncated, damaged or of an unknown kind."""


class EngineDeadError(RuntimeError):
    """The engine process has ended; `reason` is the last thing that it said."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(f"The engine has stopped: {reason or 'no reason given'}")
        self.reason = reason
