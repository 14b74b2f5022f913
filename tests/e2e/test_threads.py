"""An engine keeps to its processors, and their number changes no answer."""

import os
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


@bit_for_bit
@pytest.mark.skipif(len(USABLE) < 2, reason="needs two processors")
def test_an_engine_on_one_processor_says_what_one_on_all_says(plain_server: Server):
    first, *others = USABLE
    server = start_server(
        *LIMITS,
        "--speculative-config",
        "null",
        env={"VLLM_CPU_OMP_THREADS_BIND": str(first)},
    )
    try:
        for body in (
            {"prompt": "The sea " * 100, "temperature": 0, "logprobs": 5},
            {"prompt": "Once upon a time", "seed": 1, "logprobs": 5},
        ):
            body |= {"max_tokens": 40}
            assert answer(server, body) == answer(plain_server, body)
        assert psutil.Process(engine_pid(server)).cpu_affinity() == [first]
        # The process that serves HTTP is not in its way.
        assert psutil.Process(server.process.pid).cpu_affinity() == others
    finally:
        stop_server(server)
