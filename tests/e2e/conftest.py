"""A real server on the embedded model, started once for all end-to-end tests."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 768
# Holds one request of the full length and little more: a busy server must preempt.
NUM_GPU_BLOCKS = 96
START_TIMEOUT_S = 120


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        base_url: without the /v1.
        log_path: its standard error.
    """

    base_url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def client(self) -> openai.OpenAI:
        """A client of the official library that never retries."""
        return openai.OpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=120
        )

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=300
        )

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = httpx.get(f"{self.base_url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
        assert values, f"{name} is not in /metrics"
        return sum(float(value) for value in values)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(*flags: str, env: dict[str, str] | None = None) -> Server:
    """Start `vllm serve` and wait until it is healthy."""
    port = free_port()
    log = tempfile.NamedTemporaryFile(suffix=".log", delete=False)  # noqa: SIM115
    command = [sys.executable, "-m", "vllm", "serve"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    server = Server(f"http://127.0.0.1:{port}", process, Path(log.name))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{server.base_url}/health").status_code == 200:
                return server
        except httpx.TransportError:
            time.sleep(0.1)
    process.kill()
    pytest.fail(f"the server did not start:\n{server.log_path.read_text()}")


def stop_server(server: Server) -> int:
    """Ask the server to stop and return its exit status."""
    server.process.terminate()
    return server.process.wait(timeout=30)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = start_server(
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--num-gpu-blocks-override",
        str(NUM_GPU_BLOCKS),
        "--max-num-batched-tokens",
        "256",
    )
    yield running
    stop_server(running)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client
