"""A real server on the embedded model, started once for all end-to-end tests."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.drafters import (
    ITS_OWN,
    NO_DRAFTER,
    make_speculative_config,
    save_drafters,
)
from vllm.transformers_utils.configs.dspark import load_dspark_config

MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 768
# Holds one request of the full length and little more: a busy server must preempt.
NUM_GPU_BLOCKS = 64
# Fewer than the 64 requests of a mixed batch have, with all their drafts.
MAX_NUM_BATCHED_TOKENS = 128
START_TIMEOUT_S = 120
IDLE_WITHIN_S = 10.0
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
LIMITS = (
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--num-gpu-blocks-override",
    str(NUM_GPU_BLOCKS),
    "--max-num-batched-tokens",
    str(MAX_NUM_BATCHED_TOKENS),
)
# What the answers and the log tell of drafts.
DETAILS = (
    "--enable-per-request-metrics",
    "--per-request-spec-decode-metrics",
    "detailed",
)
LOGS = {"VLLM_LOG_STATS_INTERVAL": "1"}


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        base_url: without the /v1.
        log_path: its standard error.
        num_drafts: that a request can have in a step.
        is_adaptive: how many of them are verified, or proposed at all, depends on time.
    """

    base_url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    num_drafts: int = 0
    is_adaptive: bool = False

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

    def check_idle(self, within_s: float = IDLE_WITHIN_S) -> None:
        """Check that nothing is left; the engine may not have heard of all ends yet."""
        deadline = time.monotonic() + within_s
        gauges = dict.fromkeys(GAUGES, 1.0)
        while any(gauges.values()) and time.monotonic() < deadline:
            gauges = {name: self.metric(name) for name in GAUGES}
        assert gauges == dict.fromkeys(GAUGES, 0)
        assert httpx.get(f"{self.base_url}/health").status_code == 200


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
    """A server that was told nothing about drafts."""
    running = start_server(*LIMITS, *DETAILS, env=LOGS)
    yield running
    stop_server(running)


@pytest.fixture(scope="session")
def plain_server() -> Iterator[Server]:
    """A server without drafts."""
    running = start_server(*LIMITS, "--speculative-config", "null")
    yield running
    stop_server(running)


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of random drafters, by what drafts with them."""
    return save_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="session")
def drafting(
    request: pytest.FixtureRequest, drafters: dict[str, Path]
) -> Iterator[Server]:
    """The server with the drafter that a test names, or without one."""
    if request.param == NO_DRAFTER:
        yield request.getfixturevalue("plain_server")
        return
    if request.param == ITS_OWN:
        # Skips where there is none.
        drafter = load_dspark_config(request.getfixturevalue("embedded_drafter"))
        running = request.getfixturevalue("server")
        num_drafts = drafter.num_proposed_tokens or drafter.num_draft_tokens
        yield replace(running, num_drafts=num_drafts, is_adaptive=True)
        return
    config = make_speculative_config(request.param, drafters)
    flags = ("--speculative-config", json.dumps(config))
    running = start_server(*LIMITS, *DETAILS, *flags, env=LOGS)
    yield replace(
        running,
        num_drafts=config["num_speculative_tokens"],
        is_adaptive=config.get("enable_adaptive_verification", False),
    )
    stop_server(running)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client
