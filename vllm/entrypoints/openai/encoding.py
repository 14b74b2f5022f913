"""JSON bodies and server-sent events, encoded by msgspec."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from vllm.entrypoints.openai.errors import ErrorInfo, ErrorResponse

SSE_DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer; `content` is anything that msgspec encodes."""
    return Response(
        _encoder.encode(content),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def error_response(
    error: ErrorInfo, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer to a request that failed."""
    return json_response(ErrorResponse(error), error.code, headers)


def sse_event(content: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"
