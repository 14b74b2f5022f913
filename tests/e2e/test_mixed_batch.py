"""A request gets the same answer alone and in a full, preempting batch with drafts."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MAX_NUM_BATCHED_TOKENS, Server
from tests.e2e.drafters import DRAFTERS, NO_DRAFTER
from tests.e2e.mixed_requests import (
    NUM_REQUESTS,
    check_answer,
    count_uses,
    kind_of,
    make_request,
)
from tests.markers import bit_for_bit

# The answers come one by one, and all at once six times.
pytestmark = [
    pytest.mark.timeout(1200),
    bit_for_bit,
]
NUMBERS = range(NUM_REQUESTS)


async def _send_all(server: Server, at_once: int) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(at_once)

    async def send(number: int) -> dict[str, Any]:
        async with gate:
            response = await client.post(
                "/v1/chat/completions", json=make_request(number)
            )
        assert response.status_code == 200, response.text
        return response.json()

    async with httpx.AsyncClient(base_url=server.base_url, timeout=None) as client:
        return await asyncio.gather(*map(send, NUMBERS))


def visible(answer: dict[str, Any]) -> dict[str, Any]:
    """Return all of an answer but what is the server's affair."""
    own = ("id", "created", "metrics")
    return {name: value for name, value in answer.items() if name not in own}


@pytest.fixture(scope="session")
def alone(plain_server: Server) -> list[dict[str, Any]]:
    return asyncio.run(_send_all(plain_server, at_once=1))


def test_the_batch_uses_every_sampling_parameter_twice():
    assert NUM_REQUESTS == 64
    assert [name for name, num_uses in count_uses().items() if num_uses < 2] == []


def test_an_answer_alone_is_what_its_request_allows(alone: list[dict[str, Any]]):
    for number, answer in zip(NUMBERS, alone, strict=True):
        check_answer(number, answer)
    reasons = {choice["finish_reason"] for one in alone for choice in one["choices"]}
    assert reasons == {"stop", "length"}
    lengths = [answer["usage"]["prompt_tokens"] for answer in alone]
    assert sum(length > MAX_NUM_BATCHED_TOKENS for length in lengths) >= 12


@pytest.mark.parametrize("drafting", [NO_DRAFTER, *DRAFTERS], indirect=True)
def test_every_answer_of_a_full_batch_equals_the_answer_alone(
    drafting: Server, alone: list[dict[str, Any]], request: pytest.FixtureRequest
):
    """Text, ids, reason, usage and scores, bit for bit: no tie may fall otherwise."""
    preemptions = drafting.metric("vllm:num_preemptions_total")
    together = asyncio.run(_send_all(drafting, at_once=NUM_REQUESTS))
    for number, one, other in zip(NUMBERS, together, alone, strict=True):
        assert visible(one) == visible(other), (number, kind_of(number))
    # Where nearly all drafts are accepted, answers end before the cache is full.
    if request.node.callspec.params["drafting"] != "H":
        assert drafting.metric("vllm:num_preemptions_total") > preemptions
    if drafting.is_adaptive:
        drafted, admitted = (
            drafting.metric(f"vllm:spec_decode_num_{name}_tokens_total")
            for name in ("draft", "admitted")
        )
        assert drafted > admitted > 0
    drafting.check_idle()
