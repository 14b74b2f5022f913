"""uvicorn's HTTP protocol with limits on the head of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.entrypoints.openai.encoding import error_response
from vllm.entrypoints.openai.errors import ErrorInfo
from vllm.entrypoints.openai.limits import (
    HEADER_TIMEOUT_S,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
)


class _HeadTooLargeError(Exception):
    """Stops the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a request whose head is too large, and gives up on a slow one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._is_too_large = False
        # Bytes that came while a head was incomplete, and those of its parsed part.
        self._num_received_bytes = 0
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless an incomplete head has grown too large."""
        if self._is_too_large:
            return
        super().data_received(data)
        if self._is_in_head and not self._is_too_large:
            self._num_received_bytes += len(data)
            if self._num_received_bytes > MAX_HEADER_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        """Start counting."""
        super().on_message_begin()
        self._start_timer()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._is_too_large = True
            raise _HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop counting: the body has limits of its own."""
        self._is_in_head = False
        self._num_received_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused."""
        if self._is_too_large:
            self._refuse()
            return
        self._send_error(400, "Bad Request", msg)

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self._is_too_large = True
            raise _HeadTooLargeError

    def _refuse(self) -> None:
        self._is_too_large = True
        self._send_error(
            431,
            "RequestHeaderFieldsTooLarge",
            f"The headers may have {MAX_HEADERS} fields and {MAX_HEADER_BYTES} bytes",
        )

    def _send_error(self, status: int, error_type: str, message: str) -> None:
        if self.transport.is_closing():
            return
        response = error_response(ErrorInfo(message, error_type, None, status))
        head = f"HTTP/1.1 {status} {error_type}\r\nconnection: close\r\n".encode()
        for name, value in response.raw_headers:
            head += name + b": " + value + b"\r\n"
        self.transport.write(head + b"\r\n" + bytes(response.body))
        self.transport.close()

    def _start_timer(self) -> None:
        if self._head_timer is None:
            close = self.transport.close
            self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
