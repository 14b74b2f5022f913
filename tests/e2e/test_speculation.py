"""What a server with drafts counts and tells, and what a request can ask of it."""

import asyncio
import re
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.drafters import DRAFTERS, ITS_OWN
from tests.e2e.mixed_requests import NUM_REQUESTS, make_request

ACCEPTING = (ITS_OWN, "ngram", "H")


def read_counts(server: Server) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "admitted_tokens", "accepted_tokens")
    counts = {
        f"num_{name}": server.metric(f"vllm:spec_decode_num_{name}_total")
        for name in names
    }
    return counts | {"generation_tokens": server.metric("vllm:generation_tokens_total")}


def read_places(server: Server) -> list[float]:
    text = httpx.get(f"{server.base_url}/metrics").text
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return [
        float(count) for count in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.M)
    ]


REPEATING = "one two three four five six one two three four five six one two three"


@pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)
def test_counts_of_drafts_add_up(drafting: Server):
    before = read_counts(drafting)
    for seed in range(3):
        drafting.client.completions.create(
            model="", prompt=REPEATING, max_tokens=12, temperature=0.3, seed=seed
        )
    after, places = read_counts(drafting), read_places(drafting)
    assert after["num_drafts"] > before["num_drafts"] or drafting.is_adaptive
    assert after["num_drafts"] <= after["num_draft_tokens"]
    assert after["num_draft_tokens"] <= after["num_drafts"] * drafting.num_drafts
    assert len(places) == drafting.num_drafts
    assert sum(places) == after["num_accepted_tokens"]
    assert after["num_accepted_tokens"] <= after["num_admitted_tokens"]
    assert after["num_admitted_tokens"] <= after["num_draft_tokens"]
    is_trimmed = after["num_admitted_tokens"] < after["num_draft_tokens"]
    assert drafting.is_adaptive or not is_trimmed
    assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("drafting", ACCEPTING, indirect=True)
@pytest.mark.parametrize("cap", [0, 1, 99])
def test_a_request_decides_how_many_drafts_it_gets(drafting: Server, cap: int):
    before = read_counts(drafting)
    drafting.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=12,
        temperature=0,
        extra_body={"num_speculative_tokens": cap, "ignore_eos": True},
    )
    after = read_counts(drafting)
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["generation_tokens"] == 12
    most = grown["num_drafts"] * min(cap, drafting.num_drafts)
    assert grown["num_drafts"] <= grown["num_draft_tokens"] <= most or cap == 0
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert grown[name] == 0 or cap > 0
        assert grown[name] > 0 or cap == 0 or drafting.is_adaptive


@pytest.mark.parametrize("drafting", ACCEPTING, indirect=True)
def test_a_cached_prefix_is_drafted_from_as_a_new_one(drafting: Server):
    """A drafter's own cache is kept with the model's."""

    def answer(prompt: str) -> tuple[str, float, float, int]:
        before = read_counts(drafting)
        hits = drafting.metric("vllm:prefix_cache_hits_total")
        response = drafting.client.completions.create(
            model="",
            prompt=prompt,
            max_tokens=16,
            temperature=0,
            extra_body={"ignore_eos": True, "cache_salt": "of this test"},
        )
        accepted = read_counts(drafting)["num_accepted_tokens"]
        return (
            response.choices[0].text,
            accepted - before["num_accepted_tokens"],
            drafting.metric("vllm:prefix_cache_hits_total") - hits,
            response.usage.prompt_tokens,
        )

    prompt = "She sold seven shells by the sea shore, and then she sold " * 12
    cold, warm = answer(prompt), answer(prompt)
    num_cacheable = (cold[3] - 1) // 16 * 16
    assert num_cacheable > 100
    assert (cold[2], warm[2]) == (0, num_cacheable)
    assert warm[0] == cold[0]
    if not drafting.is_adaptive:
        assert warm[1] == cold[1] > 0


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
    request = make_request(number)
    return {name: value for name, value in request.items() if name not in ("stop", "n")}


async def _ask(server: Server, requests: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=None) as client:
        responses = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=one) for one in requests)
        )
    return [response.json() for response in responses]


@pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)
def test_the_answers_together_tell_what_the_counters_tell(
    drafting: Server,
):
    before, places_before = read_counts(drafting), read_places(drafting)
    requests = [make_told_request(number) for number in range(0, NUM_REQUESTS, 4)]
    responses = asyncio.run(_ask(drafting, requests))
    after, places_after = read_counts(drafting), read_places(drafting)
    grown = {name: value - before[name] for name, value in after.items()}
    told = [response["metrics"]["speculative_decoding"] for response in responses]
    for metrics in told:
        check_consistency(metrics, drafting.num_drafts)
    assert grown["num_drafts"] == sum(one["num_spec_steps"] for one in told)
    # An answer tells of the drafts that were verified.
    assert grown["num_admitted_tokens"] == sum(one["num_draft_tokens"] for one in told)
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
    assert places == [
        sum(histogram[place + 1 :]) for place in range(drafting.num_drafts)
    ]


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


@pytest.mark.parametrize("drafting", DRAFTERS, indirect=True)
def test_the_log_tells_what_the_counters_tell(drafting: Server):
    pattern = r"SpecDecoding metrics: .* Accepted: (\d+) tokens, Drafted: (\d+) tokens"
    counts = read_counts(drafting)
    expected = (counts["num_accepted_tokens"], counts["num_draft_tokens"])
    deadline = time.monotonic() + 20
    logged: tuple[int, ...] = ()
    while logged != expected and time.monotonic() < deadline:
        lines = re.findall(pattern, drafting.log_path.read_text())
        logged = tuple(sum(map(int, column)) for column in zip(*lines, strict=True))
        time.sleep(0.2)
    assert logged == expected


@pytest.mark.parametrize("drafting", ["H"], indirect=True)
def test_a_drafter_that_equals_its_target_is_always_right(
    drafting: Server,
):
    response = drafting.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=14,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    metrics = response.metrics["speculative_decoding"]
    check_consistency(metrics, drafting.num_drafts)
    # The first token, thrice four, and one for which there is no draft to be had.
    assert metrics["draft_acceptance_rate"] == 1.0
    assert metrics["mean_acceptance_length"] == 4.0
    assert metrics["per_step_accepted"] == [3, 3, 3]


@pytest.mark.parametrize("drafting", ACCEPTING, indirect=True)
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_tells_in_its_last_chunk_what_the_whole_answer_tells(
    drafting: Server, is_chat: bool
):
    shared: dict[str, Any] = {
        "model": "",
        "max_tokens": 10,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    create: Any = drafting.client.completions.create
    shared |= {"prompt": REPEATING}
    if is_chat:
        create = drafting.client.chat.completions.create
        shared["messages"] = [{"role": "user", "content": shared.pop("prompt")}]
    whole = create(**shared)
    *chunks, last = create(
        **shared, stream=True, stream_options={"include_usage": True}
    )
    assert all(not hasattr(chunk, "metrics") for chunk in chunks)
    drafts = last.metrics["speculative_decoding"]
    if not drafting.is_adaptive:
        assert drafts == whole.metrics["speculative_decoding"]
        assert drafts["num_draft_tokens"] > 0
    for response in (whole, last):
        check_consistency(response.metrics["speculative_decoding"], drafting.num_drafts)
        assert set(response.metrics) == {*TIMES, "speculative_decoding"}
        times = [response.metrics[name] for name in TIMES]
        assert all(time >= 0 for time in times)
        first, generation, queue, itl, speed = times
        assert queue <= first
        assert itl == pytest.approx(generation / 9)
        assert speed == pytest.approx(1000 / itl)


@pytest.mark.parametrize("drafting", ACCEPTING, indirect=True)
def test_a_request_without_drafts_tells_that_there_were_none(
    drafting: Server,
):
    response = drafting.client.completions.create(
        model="",
        prompt=REPEATING,
        max_tokens=4,
        extra_body={"num_speculative_tokens": 0},
    )
    metrics = response.metrics["speculative_decoding"]
    check_consistency(metrics, drafting.num_drafts)
    assert metrics["num_spec_steps"] == 0
    assert metrics["mean_acceptance_length"] == 1.0
