"""With drafts a server answers what it answers without them, and counts them truly."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MAX_MODEL_LEN, Server, start_server, stop_server
from tests.e2e.test_mixed_batch import answer_of, literal, make_request
from vllm.transformers_utils.model_files import resolve_model_path

NUM_REQUESTS = 24
# Each of the eight kinds thrice; what a kind asks for goes on top of it.
CAPS = (None, 0, 1)
NUM_DRAFTS = {"ngram": 4, "itself": 3}
FLAGS = {
    "ngram": (
        "--speculative-config.method",
        "ngram",
        "--speculative-config.prompt_lookup_min",
        "1",
        "--speculative-config.prompt_lookup_max",
        "4",
    ),
    "itself": (
        "--speculative-config.method",
        "draft_model",
        "--speculative-config.model",
        resolve_model_path(None),
    ),
}
# A step holds a few requests with all their drafts, and chunks of a prompt.
NUM_BATCHED_TOKENS = 100


def make_tempting_request(number: int) -> dict[str, Any]:
    """Return a request whose prompt holds what a grammar or a stop must cut."""
    request = make_request(number)
    [message] = request["messages"]
    # A wrong literal, whose words n-grams copy where the grammar forbids them.
    tempting = f"{literal(number + 1)} {literal(number + 2)} {message['content']}"
    request["messages"] = [{"role": "user", "content": tempting}]
    # Grammars, the second and third kind, come to their end.
    if number % 8 not in (1, 2):
        request["max_completion_tokens"] = 20
    cap = CAPS[number // 8]
    if cap is not None:
        extra = request.get("extra_body", {})
        request["extra_body"] = extra | {"num_speculative_tokens": cap}
    return request


async def _answer_all(server: Server) -> list[Any]:
    async with server.async_client as client:
        requests = map(make_tempting_request, range(NUM_REQUESTS))
        return await asyncio.gather(
            *(client.chat.completions.create(**request) for request in requests)
        )


@pytest.fixture(scope="module")
def plain_answers(server: Server) -> list[Any]:
    return [answer_of(response) for response in asyncio.run(_answer_all(server))]


@pytest.fixture(scope="module", params=list(FLAGS))
def drafting(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    num_drafts = NUM_DRAFTS[request.param]
    running = start_server(
        *FLAGS[request.param],
        "--speculative-config.num_speculative_tokens",
        str(num_drafts),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--max-num-batched-tokens",
        str(NUM_BATCHED_TOKENS),
    )
    yield running, num_drafts
    stop_server(running)


def read_counts(server: Server) -> dict[str, float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return {name: server.metric(f"vllm:spec_decode_{name}_total") for name in names} | {
        "generation_tokens": server.metric("vllm:generation_tokens_total")
    }


def read_places(server: Server) -> list[float]:
    text = httpx.get(f"{server.base_url}/metrics").text
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return [
        float(count) for count in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.M)
    ]


def test_a_mixed_batch_gets_the_answers_of_a_server_without_drafts(
    drafting: tuple[Server, int], plain_answers: list[Any]
):
    server, num_drafts = drafting
    responses = asyncio.run(_answer_all(server))
    for number, response in enumerate(responses):
        assert answer_of(response) == plain_answers[number], f"request {number}"
        if number % 8 == 2:
            assert response.choices[0].message.content == literal(number)
    counts, places = read_counts(server), read_places(server)
    assert counts["num_accepted_tokens"] > 0
    assert sum(places) == counts["num_accepted_tokens"]
    assert places == sorted(places, reverse=True)
    assert len(places) == num_drafts
    assert counts["num_drafts"] <= counts["num_draft_tokens"]
    assert counts["num_draft_tokens"] <= counts["num_drafts"] * num_drafts
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


REPEATING = "one two three four five six one two three four five six one two three"


@pytest.mark.parametrize(("cap", "max_drafts"), [(0, 0), (1, 1), (99, 99)])
def test_a_request_decides_how_many_drafts_it_gets(
    drafting: tuple[Server, int], cap: int, max_drafts: int
):
    server, num_drafts = drafting
    before = read_counts(server)
    server.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=12,
        temperature=0,
        extra_body={"num_speculative_tokens": cap, "ignore_eos": True},
    )
    grown = {name: value - before[name] for name, value in read_counts(server).items()}
    assert grown["generation_tokens"] == 12
    most = grown["num_drafts"] * min(max_drafts, num_drafts)
    assert grown["num_drafts"] <= grown["num_draft_tokens"] <= most or cap == 0
    assert (grown["num_draft_tokens"] > 0) == (cap > 0)


def test_a_cached_prefix_is_drafted_from_as_a_new_one(drafting: tuple[Server, int]):
    """A drafter's own cache is kept with the model's."""
    server, _ = drafting

    def answer(prompt: list[int]) -> tuple[str, float, float]:
        before = read_counts(server)
        hits = server.metric("vllm:prefix_cache_hits_total")
        response = server.client.completions.create(
            model="",
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        accepted = read_counts(server)["num_accepted_tokens"]
        return (
            response.choices[0].text,
            accepted - before["num_accepted_tokens"],
            server.metric("vllm:prefix_cache_hits_total") - hits,
        )

    prompt = [300, 301, 302, 303, 304, 999] * 40
    cold, warm = answer(prompt), answer(prompt)
    assert (cold[2], warm[2]) == (0, 224)
    assert warm[:2] == cold[:2]
    assert cold[1] > 0


def test_whoever_leaves_amid_accepted_drafts_leaves_nothing(
    drafting: tuple[Server, int],
):
    server, _ = drafting
    body = {"prompt": REPEATING, "max_tokens": 500, "stream": True, "temperature": 0}

    async def leave(num_lines: int) -> None:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream(
                "POST", f"{server.base_url}/v1/completions", json=body
            ) as response,
        ):
            async for _ in response.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    return

    async def leave_all() -> None:
        await asyncio.gather(*map(leave, range(12)))
        for _ in range(50):
            if server.metric("vllm:num_requests_running") == 0:
                return
            await asyncio.sleep(0.1)

    asyncio.run(leave_all())
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    usual = server.client.completions.create(model="", prompt="Hi", max_tokens=2)
    assert usual.usage is not None
    assert usual.usage.completion_tokens <= 2
