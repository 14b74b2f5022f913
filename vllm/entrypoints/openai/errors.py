"""Every failure as the API's error object with its HTTP status."""

import reprlib
from http import HTTPStatus

import msgspec
from pydantic import ValidationError

from vllm.entrypoints.openai.limits import (
    MAX_INPUT_CHARS,
    MAX_LISTED_ERRORS,
    MAX_MESSAGE_CHARS,
)
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineOverloadedError

logger = init_logger(__name__)


class ErrorInfo(msgspec.Struct):
    """What went wrong.

    Args:
        param: the request field that is wrong, with dots.
        code: the HTTP status.
    """

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorInfo


class ApiError(Exception):
    """A failure that knows its HTTP status.

    Args:
        status: of the answer.
        error_type: the class name that clients see.
        param: the request field that is wrong.
    """

    def __init__(
        self, status: int, error_type: str, message: str, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.message = message
        self.param = param


class ClientDisconnectedError(Exception):
    """Nobody waits for the answer any more."""


class ServerStoppingError(ApiError):
    """The server was told to stop before the answer was complete."""

    def __init__(self) -> None:
        super().__init__(503, "ServiceUnavailableError", "The server is shutting down")


def error_from(exception: BaseException) -> ErrorInfo:
    """Return what the client is told about `exception`; unknown ones are logged."""
    if isinstance(exception, ApiError):
        return ErrorInfo(
            _clip(exception.message),
            exception.error_type,
            exception.param,
            exception.status,
        )
    if isinstance(exception, VLLMValidationError):
        message = _clip(exception.message)
        return ErrorInfo(message, "BadRequestError", exception.parameter, 400)
    if isinstance(exception, ValidationError):
        return _validation_error(exception)
    if isinstance(exception, NotImplementedError):
        return ErrorInfo(_clip(str(exception)), "NotImplementedError", None, 501)
    if isinstance(exception, EngineOverloadedError):
        return ErrorInfo(_clip(str(exception)), "ServiceUnavailableError", None, 503)
    if isinstance(exception, EngineDeadError):
        return ErrorInfo("The engine has stopped", "InternalServerError", None, 503)
    logger.error("A request failed", exc_info=exception)
    return ErrorInfo("Internal server error", "InternalServerError", None, 500)


def error_from_status(status: int, detail: str) -> ErrorInfo:
    """Return the error of a bare HTTP status, such as that of an unknown path."""
    phrase = HTTPStatus(status).phrase
    name = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(status, phrase)
    return ErrorInfo(_clip(detail or phrase), name, None, status)


def _validation_error(exception: ValidationError) -> ErrorInfo:
    errors = exception.errors(include_url=False, include_context=False)
    lines = []
    for error in errors[:MAX_LISTED_ERRORS]:
        path = ".".join(str(part) for part in error["loc"])
        line = f"{_clip(path, MAX_INPUT_CHARS) or 'body'}: {error['msg']}"
        if error["type"] not in ("missing", "json_invalid"):
            line += f" (got {_show(error['input'])})"
        lines.append(line)
    if len(errors) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(errors) - MAX_LISTED_ERRORS} more")
    first = errors[0]["loc"]
    param = str(first[0])[:MAX_INPUT_CHARS] if first else None
    return ErrorInfo("; ".join(lines), "Bad Request", param, 400)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_INPUT_CHARS


def _show(value: object) -> str:
    return _clip(_repr.repr(value), MAX_INPUT_CHARS)


def _clip(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
