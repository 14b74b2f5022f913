"""A server that sends exact bytes, for tests of what reads them."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

OK = b"HTTP/1.1 200 OK\r\n"


class ByteServer:
    """Answers every request with the same pieces, on a free port of loopback.

    Args:
        pieces: sent one after another, each read before the next is there.
        holds: keep the connection open after them until the client closes it.
        pause_s: after each piece.
    """

    def __init__(self, pieces: Sequence[bytes], holds: bool, pause_s: float) -> None:
        self.requests: list[bytes] = []
        self.answers: list[asyncio.Task[None]] = []
        self.port = 0
        # Set when a client has closed the connection that the server held.
        self.is_left = asyncio.Event()
        self._pieces = pieces
        self._holds = holds
        self._pause_s = pause_s

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read one request, and send the pieces."""
        task = asyncio.current_task()
        assert task is not None
        self.answers.append(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            # The client has gone.
            self.is_left.set()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        self.requests.append(head + await reader.readexactly(length))
        for piece in self._pieces:
            writer.write(piece)
            await writer.drain()
            # The client runs in this loop: it reads the piece now.
            await asyncio.sleep(self._pause_s or 0.001)
        if self._holds:
            await reader.read()
            self.is_left.set()


@asynccontextmanager
async def serve_bytes(
    *pieces: bytes,
    holds: bool = False,
    pause_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ByteServer]:
    """Run a server for as long as the block."""
    server = ByteServer(pieces, holds, pause_s)
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()
        await asyncio.gather(*server.answers)


def chunked(*pieces: bytes) -> bytes:
    """Return a whole answer with a body in chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def with_length(body: bytes) -> bytes:
    """Return a whole answer that says how long its body is."""
    return OK + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def until_close(body: bytes) -> bytes:
    """Return an answer whose body ends with the connection."""
    return OK + b"\r\n" + body
