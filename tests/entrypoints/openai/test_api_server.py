"""How the server process begins and ends; the engine in it is a fake."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from vllm.entrypoints.openai.api_server import PathFilter, check_ssl_files, listen
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.exceptions import VLLMValidationError

ROOT = Path(__file__).parents[3]
SERVE = """
import asyncio, sys, threading, time
from tests.entrypoints.openai.fake_engine import FakeEngine
from vllm.entrypoints.openai.api_server import listen, serve
from vllm.entrypoints.openai.cli_args import FrontendArgs

args = FrontendArgs(port=0)
listener = listen(args)
print(listener.getsockname()[1], flush=True)

async def main():
    engine = FakeEngine(answer="x" * 3000, step_delay_s=0.02)
    loop = asyncio.get_running_loop()
    if "die" in sys.argv:
        loop.call_later(2.0, engine.die, "the fuse has blown")
    return await serve(engine, args, listener, time.perf_counter())

sys.exit(0 if asyncio.run(main()) else 1)
"""


@contextmanager
def server_process(
    *flags: str, grace: str = "0.3"
) -> Iterator[tuple[subprocess.Popen, str]]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_SHUTDOWN_GRACE": grace}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, *flags],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            wait_for_health(url)
            yield process, url
        finally:
            process.kill()


def wait_for_health(url: str) -> None:
    for _ in range(300):
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_server_with_status_zero(signal_number: int) -> None:
    with server_process() as (process, _):
        process.send_signal(signal_number)
        assert process.wait(timeout=10) == 0


def test_signal_ends_streams_after_the_grace_with_an_error_event() -> None:
    body = {"prompt": "a", "max_tokens": 3000, "stream": True}
    with (
        server_process() as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert "data: " in next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, done = (line for line in lines if line)
        assert '"code":503' in error
        assert done == "data: [DONE]"
        assert process.wait(timeout=10) == 0


def test_request_that_ends_within_the_grace_is_answered() -> None:
    body = {"prompt": "a", "max_tokens": 20, "stream": True}
    with (
        server_process(grace="10") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert "data: " in next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert any('"finish_reason":"length"' in line for line in rest)
        assert process.wait(timeout=10) == 0


def wait_for_closed_door(url: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            return
    raise AssertionError("the server still takes requests")


def test_second_signal_ends_at_once() -> None:
    body = {"prompt": "a", "max_tokens": 3000, "stream": True}
    with (
        server_process(grace="60") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert "data: " in next(lines)
        process.send_signal(signal.SIGTERM)
        # Two signals that nobody has seen are one: the first closes the door.
        wait_for_closed_door(url)
        # Still streaming: the grace is long.
        assert any("data: " in next(lines) for _ in range(10))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


def test_death_of_the_engine_is_told_and_ends_with_status_one() -> None:
    with server_process("die") as (process, url):
        body = {"prompt": "a", "max_tokens": 3000}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert response.status_code == 503
        _, log = process.communicate(timeout=10)
        assert process.returncode == 1
        assert "the fuse has blown" in log
        assert "Traceback" not in log


def test_address_in_use_is_an_error_that_names_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}.*--port"):
            listen(FrontendArgs(port=port))


def test_unix_socket_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "vllm.sock"
    with listen(FrontendArgs(uds=str(path))):
        assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError, match="exists already"):
        listen(FrontendArgs(uds=str(path)))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid: "),
        ({"uds": "/no/such/folder/socket"}, "--uds /no/such/folder/socket: No such"),
        ({"uds": "/tmp/" + "x" * 200}, "--uds /tmp/x*: AF_UNIX path too long"),
    ],
)
def test_an_address_that_does_not_exist_is_named(given: dict, named: str) -> None:
    with pytest.raises(OSError, match=named):
        listen(FrontendArgs(**given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ssl_keyfile": "key.pem"}, "needs both"),
        ({"ssl_keyfile": "k.pem", "ssl_certfile": "c.pem"}, r"c\.pem.*No such file"),
        ({"ssl_keyfile": __file__, "ssl_certfile": __file__}, "PEM"),
    ],
)
def test_https_without_its_files_is_refused_before_the_start(
    given: dict, reason: str
) -> None:
    with pytest.raises(VLLMValidationError, match=reason):
        check_ssl_files(FrontendArgs(**given))


def test_only_this_machine_is_listened_to_by_default() -> None:
    with listen(FrontendArgs(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("path", "is_logged"),
    [("/health", False), ("/health?x=1", False), ("/v1/models", True)],
)
def test_access_lines_of_chosen_paths_are_dropped(path: str, is_logged: bool) -> None:
    args = ("127.0.0.1:5", "GET", path, "1.1", 200)
    record = logging.LogRecord(
        "uvicorn.access", 20, "", 0, "%s %s %s %s %d", args, None
    )
    assert PathFilter(("/health", "/metrics")).filter(record) is is_logged
