"""Ways to call the application: in the loop of the test, and over a real socket."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from vllm.entrypoints.openai.api_server import listen, make_server
from vllm.entrypoints.openai.cli_args import FrontendArgs


@asynccontextmanager
async def connect(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the application without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def call(app: Any, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    """Post `body`, or get the path without one."""
    async with connect(app) as client:
        if body is None:
            return await client.get(path, **kwargs)
        return await client.post(path, json=body, **kwargs)


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def run_server(make_app: Callable[[], Any], **args: Any) -> Iterator[str]:
    """Serve on a free port of this machine; yield the base URL."""
    frontend = FrontendArgs(port=0, **args)
    listener = listen(frontend)
    port = listener.getsockname()[1]
    server = make_server(None, frontend)

    def run() -> None:
        async def main() -> None:
            # Made here: its events belong to this loop.
            server.config.app = make_app()
            await server.serve(sockets=[listener])

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for `condition`, which must come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
