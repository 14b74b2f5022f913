"""A client that goes away leaves nothing behind (BB-19)."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server

GONE_WITHIN_S = 2.0
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell a very long story. " * 20}],
    "max_completion_tokens": 400,
    "ignore_eos": True,
}
VARIANTS = {
    "plain": {},
    "stream": {"stream": True},
    "n": {"n": 4},
    "grammar": {"structured_outputs": {"regex": "[a-z]{900}"}},
    "stream-grammar": {"structured_outputs": {"regex": "[a-z ]+"}, "stream": True},
}


async def _leave(server: Server, body: dict[str, Any], after_s: float) -> None:
    async with httpx.AsyncClient(base_url=server.base_url) as client:
        try:
            async with asyncio.timeout(after_s):
                await client.post("/v1/chat/completions", json=body)
        except TimeoutError:
            return
    pytest.fail("the request was over before its client left")


async def _leave_many(server: Server, body: dict[str, Any]) -> None:
    # While the grammar compiles, in the prefill and in mid-decode.
    await asyncio.gather(
        *(_leave(server, body, 0.01 + 0.12 * number) for number in range(8))
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_abandoned_request_is_freed(server: Server, variant: str):
    asyncio.run(_leave_many(server, BODY | VARIANTS[variant]))
    deadline = time.monotonic() + GONE_WITHIN_S
    gauges = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    left = None
    while time.monotonic() < deadline:
        left = {name: server.metric(name) for name in gauges}
        if not any(left.values()):
            break
        time.sleep(0.05)
    assert left == dict.fromkeys(gauges, 0)
    assert httpx.get(f"{server.base_url}/health").status_code == 200
