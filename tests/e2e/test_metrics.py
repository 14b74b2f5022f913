"""The counters tell what was sent and answered."""

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server

NAMES = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "request_params_max_tokens_sum",
    "request_params_n_sum",
)
# What is added to a request of 3 prompt tokens and 5 of output -> the growth of NAMES.
GROWTH: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (3, 5, 1, 1, 3, 5, 5, 1)),
    # Every answer is a sequence of its own, with the prompt.
    "n": ({"n": 2}, (6, 10, 2, 2, 6, 10, 10, 2)),
    "stream": ({"stream": True}, (3, 5, 1, 1, 3, 5, 5, 1)),
    "score": ({"max_tokens": 0, "echo": True}, (3, 0, 1, 0, 3, 0, 0, 1)),
    # The token that completes a stop string is the last that counts.
    "stop": ({"stop": " "}, (3, 1, 1, 1, 3, 1, 5, 1)),
    "refused": ({"temperature": -1}, (0,) * 8),
}


@pytest.mark.parametrize("name", GROWTH)
def test_counters_grow_by_what_was_done(server: Server, name: str):
    added, growth = GROWTH[name]
    body = {"prompt": [504, 6, 7], "max_tokens": 5, "temperature": 0}
    # Words with a blank before them.
    body |= {"ignore_eos": True, "allowed_token_ids": [253, 260, 282]}

    def read() -> list[float]:
        return [server.metric(f"vllm:{name}") for name in NAMES]

    before = read()
    httpx.post(f"{server.base_url}/v1/completions", json=body | added, timeout=60)
    after = read()
    assert tuple(b - a for a, b in zip(before, after, strict=True)) == growth
