"""Token ids, log-probabilities, usage and text agree, streamed or not (O2, O3)."""

import json
from functools import cache
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.drafters import ITS_OWN, NO_DRAFTER
from tests.e2e.mixed_requests import CITY, schema
from tests.markers import bit_for_bit

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
UNICODE = "Repeat: 😀🎉 日本語 naïve café 👩‍👩‍👧"
MESSAGES = [{"role": "user", "content": UNICODE}]
# Bytes of characters and little else, so that characters are split among tokens.
BYTES = list(range(100, 260))

# Name -> (path, request). Every kind of ending, of prompt and of split.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"logprobs": True, "top_logprobs": 3}),
    "chat n": (CHAT, {"logprobs": True, "n": 3, "temperature": 1.0}),
    "chat bytes": (
        CHAT,
        {"logprobs": True, "allowed_token_ids": BYTES, "temperature": 1.0},
    ),
    "chat stop": (CHAT, {"logprobs": True, "stop": ["e", "zzz"], "n": 2}),
    "chat grammar": (
        CHAT,
        {
            "logprobs": True,
            "top_logprobs": 0,
            "structured_outputs": {"choice": ["日本語", "日本", "😀😀"]},
        },
    ),
    "chat n schema": (
        CHAT,
        {"n": 4, "max_tokens": 60, "logprobs": True} | schema("city", CITY),
    ),
    "chat ids": (CHAT, {"logprobs": True, "logprob_token_ids": [5, 6]}),
    "prompts x n": (COMPLETIONS, {"prompt": ["The sea", UNICODE], "n": 2}),
    "echo": (COMPLETIONS, {"prompt": ["The sea", UNICODE], "n": 2, "echo": True}),
    "score": (COMPLETIONS, {"prompt": UNICODE, "echo": True, "max_tokens": 0}),
    "token prompts": (COMPLETIONS, {"prompt": [[504], [900, 300]], "echo": True}),
    "stop": (COMPLETIONS, {"stop": [" a", "e "]}),
    "stop kept": (
        COMPLETIONS,
        {"stop": "nd", "include_stop_str_in_output": True, "n": 2},
    ),
    "stop late": (COMPLETIONS, {"stop": ["e", "a", "o"], "min_tokens": 6}),
    "stop token": (COMPLETIONS, {"stop_token_ids": list(range(260, 400))}),
    "special": (
        COMPLETIONS,
        {"logit_bias": {"2": 30}, "ignore_eos": True, "skip_special_tokens": False},
    ),
    "bytes": (COMPLETIONS, {"allowed_token_ids": BYTES, "n": 2}),
}


def make_body(path: str, added: dict[str, Any]) -> dict[str, Any]:
    own = {"messages": MESSAGES} if path == CHAT else {"prompt": "The", "logprobs": 1}
    common = {"max_tokens": 12, "seed": 5, "temperature": 0.9, "return_token_ids": True}
    return common | own | added


@cache
def answer(server: Server, name: str) -> Any:
    """Return the answer to a request of the table, which is sent once."""
    path, added = REQUESTS[name]
    return send(server, path, make_body(path, added))


def send(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.base_url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body | {"stream": True, "stream_options": options}
    with httpx.stream(
        "POST", f"{server.base_url}{path}", json=body, timeout=60
    ) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta"))["content"]


def join_logprobs(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first or second
    return {
        name: value + second[name] if isinstance(value, list) else value
        for name, value in first.items()
    }


def join_chunks(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Return index -> the choice that the chunks add up to."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            empty = {"text": "", "token_ids": [], "logprobs": None}
            choice = joined.setdefault(part["index"], empty)
            assert choice.get("finish_reason") is None, "a chunk after the last"
            choice["text"] += text_of(part)
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"] = join_logprobs(choice["logprobs"], part["logprobs"])
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
            assert chunk["usage"]["completion_tokens"] == len(choice["token_ids"])
    return joined


with_and_without_drafts = pytest.mark.parametrize(
    "drafting", [NO_DRAFTER, "H", ITS_OWN], indirect=True
)


@bit_for_bit
@with_and_without_drafts
@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_adds_up_to_the_whole_answer(drafting: Server, name: str):
    path, added = REQUESTS[name]
    whole = answer(drafting, name)
    chunks = stream(drafting, path, make_body(path, added))
    joined = join_chunks(chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    assert sorted(joined) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        streamed = joined[choice["index"]]
        assert streamed.pop("text") == text_of(choice)
        assert streamed == {key: choice[key] for key in streamed}


@with_and_without_drafts
@pytest.mark.parametrize("name", REQUESTS)
def test_every_token_has_an_id_a_logprob_and_a_place_in_usage(
    drafting: Server, name: str
):
    path, added = REQUESTS[name]
    body = make_body(path, added)
    whole = answer(drafting, name)
    num_tokens = 0
    for choice in whole["choices"]:
        num_tokens += len(choice["token_ids"])
        assert len(choice["token_ids"]) <= body["max_tokens"]
        num_shown = len(choice["token_ids"])
        if body.get("echo"):
            num_shown += len(choice["prompt_token_ids"])
        columns = choice["logprobs"]
        columns = [columns["content"]] if path == CHAT else columns.values()
        assert {len(column) for column in columns} == {num_shown}
    assert num_tokens == whole["usage"]["completion_tokens"]


@with_and_without_drafts
@pytest.mark.parametrize(
    "name",
    ["chat", "chat grammar", "chat n schema", "bytes", "echo", "stop", "stop token"],
)
def test_a_new_score_of_the_answer_agrees_with_it(
    plain_server: Server, drafting: Server, name: str
):
    """O2: raw log-probabilities are the model's own, whatever shaped the answer."""
    path = REQUESTS[name][0]
    whole = answer(drafting, name)
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        given = (
            [entry["logprob"] for entry in logprobs["content"]]
            if path == CHAT
            else logprobs["token_logprobs"]
        )
        prompt = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        body = {"prompt": prompt + choice["token_ids"], "max_tokens": 0, "echo": True}
        again = send(plain_server, COMPLETIONS, body | {"logprobs": 0})
        scored = again["choices"][0]["logprobs"]["token_logprobs"][-len(given) :]
        # The first token of an echoed prompt has none.
        pairs = [
            pair for pair in zip(given, scored, strict=True) if pair != (None, None)
        ]
        assert all(abs(one - other) < 1e-3 for one, other in pairs)


@bit_for_bit
@pytest.mark.parametrize("drafting", ["H", ITS_OWN], indirect=True)
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_same_with_drafts(
    plain_server: Server, drafting: Server, name: str
):
    one, other = answer(drafting, name), answer(plain_server, name)
    assert one["choices"] == other["choices"]
    assert one["usage"] == other["usage"]
