"""An engine keeps to its processors, and their number changes no answer."""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import LIMITS, Server, start_server, stop_server
from tests.e2e.test_engine_death import engine_pid
from tests.markers import bit_for_bit

USABLE = sorted(os.sched_getaffinity(0))


def answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


@pytest.fixture(scope="module")
def bound_server() -> Iterator[Server]:
    """An engine on the first of several processors."""
    if len(USABLE) < 2:
        pytest.skip("needs two processors")
    bind = {"VLLM_CPU_OMP_THREADS_BIND": str(USABLE[0])}
    running = start_server(*LIMITS, "--speculative-config", "null", env=bind)
    yield running
    stop_server(running)


def test_engine_and_front_are_in_nobodys_way(bound_server: Server):
    first, *others = USABLE
    assert psutil.Process(engine_pid(bound_server)).cpu_affinity() == [first]
    assert psutil.Process(bound_server.process.pid).cpu_affinity() == others


@bit_for_bit
@pytest.mark.parametrize(
    "added",
    [{"prompt": "The sea " * 100, "temperature": 0}, {"prompt": "Once", "seed": 1}],
    ids=["greedy", "seeded"],
)
def test_an_engine_on_one_processor_says_what_one_on_all_says(
    bound_server: Server, plain_server: Server, added: dict[str, Any]
):
    body = added | {"max_tokens": 40, "logprobs": 5}
    assert answer(bound_server, body) == answer(plain_server, body)
