"""A request gets the same answer alone and in a full, preempting batch."""

import asyncio
import json
from typing import Any

import jsonschema

from tests.e2e.conftest import MODEL, Server

NUM_REQUESTS = 64
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
# fmt: off
WORDS = [
    "river", "mountain", "engine", "garden", "music", "winter", "bridge", "letter",
    "planet", "coffee", "window", "forest", "market", "silver", "island", "doctor",
]
# fmt: on


def literal(number: int) -> str:
    return f"code-{number}: " + "-".join(WORDS[(number + i) % 16] for i in range(8))


def make_request(number: int) -> dict[str, Any]:
    """Return the request of a number; its kind goes round."""
    topic = f"{WORDS[number % 16]} and {WORDS[number * 7 % 16]}"
    long_prompt = f"Notes about {topic}. " * (1 + number % 5 * 6)
    prompt = f"{long_prompt}Write a short text about {topic}."
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_completion_tokens": 24 + number % 4 * 16,
    }
    kinds: list[dict[str, Any]] = [
        {},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": SCHEMA},
            },
            "max_completion_tokens": 120,
        },
        {"extra_body": {"structured_outputs": {"regex": literal(number)}},
         "max_completion_tokens": 120},
        {"logprobs": True, "top_logprobs": 3, "temperature": 0.8, "seed": number},
        {"n": 2, "temperature": 1.0, "seed": number},
        {"stop": [" the", "and "], "temperature": 0.7, "seed": number},
        {"temperature": 1.0, "top_p": 0.9, "seed": number,
         "extra_body": {"top_k": 50, "min_p": 0.02}},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3,
         "extra_body": {"repetition_penalty": 1.1, "min_tokens": 20}},
    ]  # fmt: skip
    return request | kinds[number % len(kinds)]


def answer_of(response: Any) -> list[Any]:
    """Return all that a client can see of the choices, in order."""
    return [
        (
            choice.index,
            choice.message.content,
            choice.finish_reason,
            [
                (entry.token, round(entry.logprob, 5))
                for entry in (choice.logprobs.content if choice.logprobs else [])
            ],
        )
        for choice in response.choices
    ] + [response.usage.completion_tokens]


async def _send(server: Server, numbers: list[int], at_once: int) -> list[Any]:
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Any:
        async with gate:
            return await client.chat.completions.create(**make_request(number))

    async with server.async_client as client:
        return await asyncio.gather(*(one(number) for number in numbers))


def test_every_answer_of_a_full_batch_equals_the_answer_alone(server: Server):
    numbers = list(range(NUM_REQUESTS))
    preemptions = server.metric("vllm:num_preemptions_total")
    together = asyncio.run(_send(server, numbers, NUM_REQUESTS))
    assert server.metric("vllm:num_preemptions_total") > preemptions
    alone = asyncio.run(_send(server, numbers, 1))
    for number, one, other in zip(numbers, together, alone, strict=True):
        assert answer_of(one) == answer_of(other), f"request {number}"
    for number, response in zip(numbers, together, strict=True):
        content = response.choices[0].message.content
        if number % 8 == 2:
            assert content == literal(number)
            assert response.choices[0].finish_reason == "stop"
        if number % 8 == 1 and response.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(content), SCHEMA)


def test_nothing_is_left_after_a_full_batch(server: Server):
    asyncio.run(_send(server, list(range(8)), 8))
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
