"""Requests being answered: each ends when its client leaves or the server stops."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.encoding import SSE_DONE, sse_event
from vllm.entrypoints.openai.errors import (
    ClientDisconnectedError,
    ErrorResponse,
    ServerStoppingError,
    error_from,
)

T = TypeVar("T")


class InFlightRequests:
    """The work of the requests that the server is answering."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Return the result of `work`, unless the client leaves before it is there.

        Args:
            work: is cancelled, and has ended when this returns, whatever happens.
            receive: of the connection, after the request's body was read.

        Raises:
            ClientDisconnectedError: the client has left.
            ServerStoppingError: `stop` was called.
        """
        if self._is_stopping:
            work.close()
            raise ServerStoppingError
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(_wait_for_disconnect(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnectedError
            if task.cancelled() and self._is_stopping:
                raise ServerStoppingError
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    def stop(self) -> None:
        """End all work, now and later, with ServerStoppingError."""
        self._is_stopping = True
        for task in list(self._tasks):
            task.cancel()


class EventStreamResponse(Response):
    """Server-sent events from an asynchronous generator.

    A failure while streaming becomes one error event; `[DONE]` always comes last. The
    generator is closed when the client leaves.

    Args:
        first: events that are there already, sent with the headers.
        events: the rest.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        in_flight: InFlightRequests,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", **(headers or {})})
        self._first = first
        self._events = events
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        tail = SSE_DONE
        try:
            await self._in_flight.run(self._pump(send), receive)
        except ClientDisconnectedError:
            return
        except (
            Exception
        ) as exception:  # The status line has left: say it in the stream.
            tail = sse_event(ErrorResponse(error_from(exception))) + SSE_DONE
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _pump(self, send: Send) -> None:
        await _send_part(send, self._first)
        async for event in self._events:
            await _send_part(send, event)


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
