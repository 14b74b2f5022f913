"""From a request's raw bytes to its checked fields."""

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from vllm import envs
from vllm.entrypoints.openai.errors import ApiError, ClientDisconnectedError
from vllm.entrypoints.openai.limits import MAX_IGNORED_FIELDS
from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T", bound=BaseModel)

# Names that were warned about; bounded, since clients choose them.
_MAX_WARNED = 1000


async def read_json(request: Request, model: type[T]) -> T:
    """Return the body as an instance of `model`.

    Raises:
        ApiError: 413, the body is too large; 415, it is not JSON by its header.
        ValidationError: it is not JSON, nested too deeply, or a field is of a wrong
            type.
        ClientDisconnectedError: the client left before it had sent the body.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip()
    # A page of another site can send other types without being asked by CORS first.
    if content_type.lower() != "application/json":
        raise ApiError(
            415,
            "UnsupportedMediaTypeError",
            "Send a JSON body with the header Content-Type: application/json",
        )
    return model.model_validate_json(await _read(request))


async def _read(request: Request) -> bytes:
    limit = envs.VLLM_HTTP_MAX_BODY_BYTES
    body = bytearray()
    length = request.headers.get("Content-Length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, "RequestTooLargeError", f"The body may have {limit} bytes at most"
    )


class IgnoredFieldsReporter:
    """Tells the log, once a name, and the client which fields had no effect."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def report(self, names: list[str]) -> dict[str, str]:
        """Return the header that names the fields; nothing if there are none."""
        if not names:
            return {}
        shown = [_for_header(name) for name in names[:MAX_IGNORED_FIELDS]]
        new = set(shown) - self._warned
        if new and len(self._warned) < _MAX_WARNED:
            self._warned |= new
            logger.warning(
                "Unknown request fields, ignored: %s", ", ".join(sorted(new))
            )
        return {"X-vLLM-Ignored-Fields": ", ".join(shown)}


def _for_header(name: str) -> str:
    """Return `name` with all that could end a header or a list replaced."""
    return "".join(
        char if char.isascii() and (char.isalnum() or char in "_.-") else "?"
        for char in name[:64]
    )
