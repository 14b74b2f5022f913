"""Server-sent events of one HTTP answer, each handed over as it arrives.

A client on the engine's own machine takes processor time from it. So there is one
connection a request, no iterator that wakes a task for each event, and of the format
only what servers of language models send: a line of data an event, with LF or CR LF.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote, urlsplit

import httptools


class StreamError(Exception):
    """Why there is no complete answer."""


class Endpoint:
    """A route of a server that answers with events.

    Args:
        url: of http or https.
        headers: of every request.
        tls: whom to trust; None is whom the system trusts.
        connect_limit_s: until the connection is there, encryption included.
        silence_limit_s: without a byte of the answer, which may take longer in all.

    Raises:
        StreamError: the address or a header cannot be used.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        connect_limit_s: float = 10.0,
        silence_limit_s: float = 600.0,
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise StreamError(f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StreamError(f"{url}: not an address of http or https")
        is_encrypted = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if is_encrypted else 80)
        self._tls = (tls or ssl.create_default_context()) if is_encrypted else None
        self._connect_limit_s = connect_limit_s
        self._silence_limit_s = silence_limit_s
        target = quote(parts.path or "/", safe="/%:=&~+!$,;'@()*")
        if parts.query:
            target += "?" + quote(parts.query, safe="/%:=&~+!$,;'@()*?")
        lines = [
            f"POST {target} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "User-Agent: vllm",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            "Connection: close",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        if not all(line.isascii() and line.isprintable() for line in lines):
            raise StreamError("a header or the host has characters that HTTP has not")
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()

    async def post(self, body: bytes, take_event: Callable[[bytes], None]) -> None:
        """Send one request, and return when its answer has ended.

        Args:
            body: JSON.
            take_event: is given the data of each event. What it raises ends the answer,
                and is raised.

        Raises:
            StreamError: there is no answer, another one than 200, or a part of one.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_limit_s):
                transport, answer = await loop.create_connection(
                    lambda: EventStream(take_event),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except TimeoutError as error:
            reason = str(error) or f"none within {self._connect_limit_s:g} s"
            raise StreamError(f"no connection: {reason}") from None
        except (OSError, UnicodeError) as error:
            raise StreamError(f"no connection: {error}") from None
        try:
            transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            await answer.wait(self._silence_limit_s)
        finally:
            # To close an encrypted one would wait for the server.
            transport.abort()


class EventStream(asyncio.Protocol):
    """Reads one answer.

    Args:
        take_event: is given the data of each event.
    """

    def __init__(self, take_event: Callable[[bytes], None]) -> None:
        self._take_event = take_event
        # Its result is why the answer is not complete.
        self._end: asyncio.Future[Exception | None]
        self._end = asyncio.get_running_loop().create_future()
        self._last_read_s = time.perf_counter()
        self._parser = httptools.HttpResponseParser(self)
        # Of the head that was read last; 0 before.
        self._status = 0
        self._has_length = False
        self._is_complete = False
        # Of the body, what is no whole line yet; all of it if the status is not 200.
        self._rest = b""

    async def wait(self, silence_limit_s: float) -> None:
        """Return when the answer has ended.

        Raises:
            StreamError: it is not complete, or not of status 200.
        """
        while not self._end.done():
            # A timer that each read put off would cost more than the read.
            left_s = self._last_read_s + silence_limit_s - time.perf_counter()
            if left_s <= 0:
                raise StreamError(f"the server was silent for {silence_limit_s:g} s")
            await asyncio.wait((self._end,), timeout=left_s)
        error = self._end.result()
        if error:
            raise error

    def data_received(self, data: bytes) -> None:
        """Hand over the events that `data` completes."""
        if self._end.done():
            return
        self._last_read_s = time.perf_counter()
        error: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as reason:
            error = StreamError(f"the answer is not HTTP: {reason}")
        # Bytes past the end of an answer are no error of its own.
        if self._is_complete:
            error = self._read_end()
        elif self._status == 200:
            error = self._hand_over() or error
        if error or self._is_complete:
            self._end.set_result(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: nothing else ends one without a length."""
        if self._end.done():
            return
        reason = f": {exc}" if exc else ""
        error: Exception | None
        if self._status < 200:
            error = StreamError(f"the server closed before its answer{reason}")
        elif self._status == 200 and (self._has_length or exc):
            error = StreamError(f"the server closed within its answer{reason}")
        else:
            error = self._read_end()
        self._end.set_result(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the body says where it ends."""
        name = name.lower()
        self._has_length |= name == b"content-length" or (
            name == b"transfer-encoding" and b"chunked" in value.lower()
        )

    def on_headers_complete(self) -> None:
        """Note the status; 1xx is not yet that of the answer."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body until the read is parsed."""
        self._rest += body

    def on_message_complete(self) -> None:
        """Note the end, if it is that of the answer."""
        self._is_complete = self._status >= 200

    def _read_end(self) -> Exception | None:
        """Return why the answer, of which no more comes, is none."""
        if self._status != 200:
            text = self._rest.decode(errors="replace")
            return StreamError(f"HTTP {self._status}: {text[:500]}")
        # Half a line is not to be overlooked: it shows that the server broke off.
        self._rest += b"\n"
        return self._hand_over()

    def _hand_over(self) -> Exception | None:
        """Hand over the events of whole lines; return what `take_event` raised."""
        *lines, self._rest = self._rest.split(b"\n")
        try:
            for line in lines:
                if line.startswith(b"data:"):
                    self._take_event(line[len(b"data:") :].strip())
        except Exception as error:
            return error
        return None
