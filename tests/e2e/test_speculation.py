"""With drafts a server answers what it answers without them, and counts them truly."""

import asyncio
import re
import time
from collections import Counter
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
NUM_DRAFTS = {"ngram": 4, "itself": 3, "its own": 7}
FLAGS = {
    "ngram": (
        "--speculative-config.method",
        "ngram",
        "--speculative-config.prompt_lookup_min",
        "1",
        "--speculative-config.prompt_lookup_max",
        "4",
        "--speculative-config.num_speculative_tokens",
        str(NUM_DRAFTS["ngram"]),
    ),
    "itself": (
        "--speculative-config.method",
        "draft_model",
        "--speculative-config.model",
        resolve_model_path(None),
        "--speculative-config.num_speculative_tokens",
        str(NUM_DRAFTS["itself"]),
    ),
    # What a server does that is told nothing.
    "its own": (),
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
def plain_answers() -> list[Any]:
    running = start_server(
        "--speculative-config", "null", "--max-model-len", str(MAX_MODEL_LEN)
    )
    answers = [answer_of(response) for response in asyncio.run(_answer_all(running))]
    stop_server(running)
    return answers


@pytest.fixture(scope="module", params=list(FLAGS))
def drafting(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    num_drafts = NUM_DRAFTS[request.param]
    if not FLAGS[request.param]:
        # Skips where none is.
        request.getfixturevalue("embedded_drafter")
    running = start_server(
        *FLAGS[request.param],
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--max-num-batched-tokens",
        str(NUM_BATCHED_TOKENS),
        "--enable-per-request-metrics",
        "--per-request-spec-decode-metrics",
        "detailed",
        env={"VLLM_LOG_STATS_INTERVAL": "1"},
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

    def answer(prompt: str) -> tuple[str, float, float, int]:
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
            response.usage.prompt_tokens,
        )

    prompt = "She sold seven shells by the sea shore, and then she sold " * 12
    cold, warm = answer(prompt), answer(prompt)
    num_cacheable = (cold[3] - 1) // 16 * 16
    assert num_cacheable > 100
    assert (cold[2], warm[2]) == (0, num_cacheable)
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


# What the answers tell of their drafts.

TIMES = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)


def make_told_request(number: int) -> dict[str, Any]:
    """Return a request that no stop string ends: the front would end it later."""
    request = make_tempting_request(number)
    return {name: value for name, value in request.items() if name not in ("stop", "n")}


async def _ask(server: Server, requests: list[dict[str, Any]]) -> list[Any]:
    async with server.async_client as client:
        return await asyncio.gather(
            *(client.chat.completions.create(**request) for request in requests)
        )


def test_the_answers_together_tell_what_the_counters_tell(
    drafting: tuple[Server, int],
):
    server, num_drafts = drafting
    before, places_before = read_counts(server), read_places(server)
    requests = [make_told_request(number) for number in range(16)]
    responses = asyncio.run(_ask(server, requests))
    after, places_after = read_counts(server), read_places(server)
    grown = {name: value - before[name] for name, value in after.items()}
    told = [response.metrics["speculative_decoding"] for response in responses]
    for metrics in told:
        check_consistency(metrics, num_drafts)
    assert grown["num_drafts"] == sum(one["num_spec_steps"] for one in told)
    assert grown["num_draft_tokens"] == sum(one["num_draft_tokens"] for one in told)
    assert grown["num_accepted_tokens"] == sum(
        one["num_accepted_draft_tokens"] for one in told
    )
    histogram = [
        sum(column)
        for column in zip(*(one["acceptance_histogram"] for one in told), strict=True)
    ]
    places = [
        after - before
        for before, after in zip(places_before, places_after, strict=True)
    ]
    assert places == [sum(histogram[place + 1 :]) for place in range(num_drafts)]


def check_consistency(metrics: dict[str, Any], num_drafts: int) -> None:
    """Check every identity between the numbers of one answer."""
    accepted, drafted = metrics["per_step_accepted"], metrics["per_step_drafted"]
    num_steps = metrics["num_spec_steps"]
    assert metrics["num_spec_tokens"] == num_drafts
    assert len(accepted) == len(drafted) == num_steps
    assert all(a <= d <= num_drafts for a, d in zip(accepted, drafted, strict=True))
    assert metrics["num_accepted_draft_tokens"] == sum(accepted)
    assert metrics["num_draft_tokens"] == sum(drafted)
    counts = Counter(accepted)
    assert metrics["acceptance_histogram"] == [counts[a] for a in range(num_drafts + 1)]
    pairs = Counter(zip(drafted, accepted, strict=True))
    assert metrics["acceptance_histogram_by_draft_length"] == {
        str(d): [pairs[d, a] for a in range(d + 1)] for d in set(drafted)
    }
    assert metrics["mean_acceptance_length"] == 1 + sum(accepted) / max(num_steps, 1)
    assert metrics["draft_acceptance_rate"] == sum(accepted) / max(sum(drafted), 1)


def test_the_log_tells_what_the_counters_tell(drafting: tuple[Server, int]):
    server, _ = drafting
    pattern = r"SpecDecoding metrics: .* Accepted: (\d+) tokens, Drafted: (\d+) tokens"
    counts = read_counts(server)
    expected = (counts["num_accepted_tokens"], counts["num_draft_tokens"])
    deadline = time.monotonic() + 20
    logged: tuple[int, ...] = ()
    while logged != expected and time.monotonic() < deadline:
        lines = re.findall(pattern, server.log_path.read_text())
        logged = tuple(sum(map(int, column)) for column in zip(*lines, strict=True))
        time.sleep(0.2)
    assert logged == expected


def test_a_drafter_that_equals_its_target_is_always_right(
    drafting: tuple[Server, int],
):
    server, num_drafts = drafting
    response = server.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=14,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    metrics = response.metrics["speculative_decoding"]
    check_consistency(metrics, num_drafts)
    if num_drafts != NUM_DRAFTS["itself"]:
        return
    # The first token, thrice four, and one for which there is no draft to be had.
    assert metrics["draft_acceptance_rate"] == 1.0
    assert metrics["mean_acceptance_length"] == 4.0
    assert metrics["per_step_accepted"] == [3, 3, 3]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_tells_in_its_last_chunk_what_the_whole_answer_tells(
    drafting: tuple[Server, int], is_chat: bool
):
    server, _ = drafting
    shared: dict[str, Any] = {
        "model": "",
        "max_tokens": 10,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    create: Any = server.client.completions.create
    shared |= {"prompt": REPEATING}
    if is_chat:
        create = server.client.chat.completions.create
        shared["messages"] = [{"role": "user", "content": shared.pop("prompt")}]
    whole = create(**shared)
    *chunks, last = create(
        **shared, stream=True, stream_options={"include_usage": True}
    )
    assert all(not hasattr(chunk, "metrics") for chunk in chunks)
    drafts = last.metrics["speculative_decoding"]
    assert drafts == whole.metrics["speculative_decoding"]
    assert drafts["num_draft_tokens"] > 0
    for response in (whole, last):
        assert set(response.metrics) == {*TIMES, "speculative_decoding"}
        times = [response.metrics[name] for name in TIMES]
        assert all(time >= 0 for time in times)
        first, generation, queue, itl, speed = times
        assert queue <= first
        assert itl == pytest.approx(generation / 9)
        assert speed == pytest.approx(1000 / itl)


def test_a_request_without_drafts_tells_that_there_were_none(
    drafting: tuple[Server, int],
):
    server, num_drafts = drafting
    response = server.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=4,
        extra_body={"num_speculative_tokens": 0},
    )
    metrics = response.metrics["speculative_decoding"]
    check_consistency(metrics, num_drafts)
    assert metrics["num_spec_steps"] == 0
    assert metrics["mean_acceptance_length"] == 1.0
