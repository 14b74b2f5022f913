"""A client that goes away leaves nothing behind (BB-19)."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.e2e.drafters import ADAPTIVE, NO_DRAFTER

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
    "stream-grammar": {"structured_outputs": {"regex": "[a-z ]{800,}"}, "stream": True},
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
        *(_leave(server, body, 0.01 + 0.05 * number) for number in range(8))
    )


@pytest.mark.parametrize("drafting", [NO_DRAFTER, "H", ADAPTIVE], indirect=True)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_abandoned_request_is_freed(drafting: Server, variant: str):
    asyncio.run(_leave_many(drafting, BODY | VARIANTS[variant]))
    drafting.check_idle(GONE_WITHIN_S)
