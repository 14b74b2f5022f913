"""Random fields with random values: always an answer, never the server's fault."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.drafters import ADAPTIVE, NO_DRAFTER

NUM_REQUESTS = 240
AT_ONCE = 8
SEED = 11
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    COMPLETIONS: {"prompt": "Hi there", "max_tokens": 3},
}
# Values that fit no field, or by chance one.
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, 2**31, 2**63, -(2**63), 2**70),
    *("", "a", "\n", "\x00", "😀", "\ufeff", "a" * 2000, "(a|"),
    *([], [0], [-1], [49151], [49152], [""], ["a", "b"], [None], [[1]], [[]], [True]),
    *({}, {"a": 1}, {"5": 1}, {"-1": 1}, {"49152": 1}, {"5": None}, {"٣": 1}),
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a"}}},
]
FIELDS: dict[str, list[Any]] = {
    "frequency_penalty": [-2, 1.5],
    "presence_penalty": [2],
    "repetition_penalty": [0.5, 1e-40, 100],
    "temperature": [0, 0.7, 100],
    "top_p": [1e-40, 0.5],
    "top_k": [1, -1],
    "min_p": [0.3, 1],
    "n": [2, 3],
    "num_speculative_tokens": [0, 1, 7],
    "seed": [-5],
    "max_tokens": [1, 5],
    "min_tokens": [1, 3],
    "stop": ["e", ["a", " the"]],
    "stop_token_ids": [[2], list(range(400))],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "logit_bias": [{"5": 100}, {"2": -100}],
    "allowed_token_ids": [[5, 6], [2], list(range(40, 300))],
    "bad_words": [["the"], ["a", " "]],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [-1, 1],
    "prompt_logprobs": [0, 3],
    "logprob_token_ids": [[4, 5]],
    "response_format": [{"type": "json_object"}, {"type": "text"}],
    "structured_outputs": [
        {"regex": "[ab]{1,5}"},
        {"choice": ["日本", "yes"]},
        {"json": {"type": "integer"}},
        {"grammar": "%%%"},
    ],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "priority": [1],
    "cache_salt": ["s"],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "logprobs": [True, 0, 5],
    "top_logprobs": [0, 5],
    "echo": [True],
    "user": ["me"],
    "nobody_knows_this": [1],
    "prompt": [["a", "b"], [[5], [6]], [2]],
    "messages": [[{"role": "assistant", "content": "x"}], [{"role": "user"}]],
    "continue_final_message": [True],
    "chat_template_kwargs": [{"x": 1}],
    "reasoning_effort": ["low"],
}


def make_request(number: int) -> tuple[str, dict[str, Any]]:
    random_ = random.Random(SEED * 10_000 + number)
    path = random_.choice([CHAT, COMPLETIONS])
    body = dict(GOOD[path])
    for name in random_.sample(sorted(FIELDS), random_.choice([1, 2, 3, 5])):
        values = FIELDS[name] if random_.random() < 0.75 else ODD
        body[name] = random_.choice(values)
    return path, body


async def _send_all(server: Server) -> list[tuple[int, str]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[int, str]:
        path, body = make_request(number)
        async with gate:
            response = await client.post(path, json=body)
        return response.status_code, response.text

    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        return await asyncio.gather(*map(one, range(NUM_REQUESTS)))


@pytest.mark.parametrize("drafting", [NO_DRAFTER, ADAPTIVE], indirect=True)
def test_random_requests_are_answered_or_refused_and_change_nothing(drafting: Server):
    plain = {"prompt": "The sea is", "max_tokens": 12, "temperature": 0, "logprobs": 1}

    def ask() -> Any:
        response = httpx.post(
            f"{drafting.base_url}{COMPLETIONS}", json=plain, timeout=60
        )
        return response.json()["choices"]

    before = ask()
    answers = asyncio.run(_send_all(drafting))
    for number, (status, text) in enumerate(answers):
        # A stream tells of its failure inside an answer of status 200.
        is_fault = '"code":5' in text or status not in (200, 400, 404)
        assert not is_fault, (make_request(number), status, text[-300:])
    # Both kinds, or the test tests nothing.
    assert {200, 400} <= {status for status, _ in answers}
    assert ask() == before
    drafting.check_idle()
