"""Everything wrong that a client can send, in a row, on one server."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.e2e.drafters import ADAPTIVE, ITS_OWN

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ANSWERED_WITHIN_S = 5.0
NESTED: Any = {"type": "string"}
for _ in range(300):
    NESTED = {"type": "array", "items": NESTED}


def structured(**constraint: Any) -> dict[str, Any]:
    return {"structured_outputs": constraint}


def schema(value: Any) -> dict[str, Any]:
    return structured(json=value)


def properties(**fields: Any) -> dict[str, Any]:
    return schema({"type": "object", "properties": fields})


# Name -> (path, what is added to a good request, what the message must name).
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "unclosed regex": (CHAT, structured(regex="(abc"), "regex"),
    "lookbehind": (CHAT, structured(regex="(?<=a)b"), "regex"),
    "lookahead": (CHAT, structured(regex="a(?=b)"), "regex"),
    "many groups": (CHAT, structured(regex="(" * 50_000), "regex"),
    "property is text": (CHAT, properties(name="string"), "json"),
    "unknown type": (CHAT, schema({"type": "foo"}), "json"),
    "minLength is text": (
        CHAT,
        schema({"type": "string", "minLength": "2"}),
        "minLength",
    ),
    "contradiction": (
        CHAT,
        schema({"type": "integer", "minimum": 5, "maximum": 4}),
        "json",
    ),
    "not json": (CHAT, schema("{"), "json"),
    "self reference": (CHAT, schema({"$ref": "#"}), "json"),
    "remote reference": (CHAT, schema({"$ref": "http://127.0.0.1:1/s"}), "$ref"),
    "deep nesting": (CHAT, schema(NESTED), "JSON"),
    "empty choice": (CHAT, structured(choice=[]), "choice"),
    "bad grammar": (CHAT, structured(grammar="root ::= ("), "grammar"),
    "two constraints": (CHAT, structured(json={}, regex="a"), "structured_outputs"),
    "no constraint": (CHAT, structured(), "structured_outputs"),
    "schema without body": (
        CHAT,
        {"response_format": {"type": "json_schema"}},
        "json_schema",
    ),
    "schema is null": (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": None},
            }
        },
        "schema",
    ),
    "unknown format": (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
    "legacy field": (CHAT, {"guided_json": {"type": "object"}}, "structured_outputs"),
    "legacy regex": (COMPLETIONS, {"guided_regex": "a"}, "structured_outputs"),
    "stop id negative": (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
    "stop id too large": (CHAT, {"stop_token_ids": [49152]}, "stop_token_ids"),
    "bias id too large": (CHAT, {"logit_bias": {"49152": 1}}, "logit_bias"),
    "bias id huge": (CHAT, {"logit_bias": {str(2**40): 1}}, "logit_bias"),
    "bias id is a word": (CHAT, {"logit_bias": {"word": 1}}, "logit_bias"),
    "bias too large": (CHAT, {"logit_bias": {"5": 1000}}, "logit_bias"),
    "allowed id": (CHAT, {"allowed_token_ids": [2**40]}, "allowed_token_ids"),
    "allowed none": (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    "prompt id": (COMPLETIONS, {"prompt": [1, 49152]}, "prompt"),
    "prompt id negative": (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    "prompt empty": (COMPLETIONS, {"prompt": []}, "prompt"),
    "prompt too long": (COMPLETIONS, {"prompt": [5] * 5000}, "5000"),
    "output too long": (CHAT, {"max_completion_tokens": 5000}, "max"),
    "temperature": (CHAT, {"temperature": -1}, "temperature"),
    "temperature text": (CHAT, {"temperature": "hot"}, "temperature"),
    "top_p": (CHAT, {"top_p": 0}, "top_p"),
    "top_k": (CHAT, {"top_k": -2}, "top_k"),
    "min_p": (CHAT, {"min_p": 1.5}, "min_p"),
    "n": (CHAT, {"n": 0}, "n"),
    "seed": (CHAT, {"seed": 1.5}, "seed"),
    "seed huge": (CHAT, {"seed": 2**70}, "seed"),
    "min over max": (CHAT, {"min_tokens": 9, "max_completion_tokens": 5}, "min_tokens"),
    "too many logprobs": (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    "logprobs off": (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    "stop empty": (CHAT, {"stop": [""]}, "stop"),
    "stop many": (CHAT, {"stop": ["a"] * 100}, "stop"),
    "penalty": (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    "stream options": (
        CHAT,
        {"stream_options": {"include_usage": True}},
        "stream_options",
    ),
    "drafts negative": (CHAT, {"num_speculative_tokens": -1}, "num_speculative_tokens"),
    "drafts text": (CHAT, {"num_speculative_tokens": "3"}, "num_speculative_tokens"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "messages are text": (CHAT, {"messages": "hello"}, "messages"),
    "image": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "http://127.0.0.1:1/a.png"},
                        }
                    ],
                }
            ]
        },
        "image_url",
    ),
    "template": (
        CHAT,
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        "chat_template",
    ),
    "tools": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
    ),
    "grammar without its tokens": (
        CHAT,
        {**structured(regex="[0-9]+"), "allowed_token_ids": [100]},
        "allowed_token_ids",
    ),
    "grammar of stop tokens": (
        COMPLETIONS,
        # Every digit ends the answer, but nothing may end before the first digit.
        {**structured(regex="[0-9]"), "stop_token_ids": list(range(32, 42))},
        "stop_token_ids",
    ),
    "megabytes": (COMPLETIONS, {"prompt": "hello world " * 400_000}, "prompt"),
    "long bad word": (CHAT, {"bad_words": ["hello " * 400_000]}, "bad_words"),
    "long stop": (CHAT, {"stop": ["hello " * 400_000]}, "stop"),
    "beam search": (CHAT, {"use_beam_search": True}, "use_beam_search"),
    "suffix": (COMPLETIONS, {"suffix": "end"}, "suffix"),
}
GOOD = {
    CHAT: {"messages": [{"role": "user", "content": "Name a colour."}]},
    COMPLETIONS: {"prompt": "The colour of the sky is"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name_and_at_once(server: Server, name: str):
    path, added, named = BAD[name]
    body = {"model": MODEL, "max_tokens": 5, **GOOD[path], **added}
    started = time.monotonic()
    response = httpx.post(f"{server.base_url}{path}", json=body, timeout=30)
    assert time.monotonic() - started < ANSWERED_WITHIN_S
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["code"] == 400
    assert named in f"{error['message']} {error['param']}"


def test_an_unknown_model_is_not_found(server: Server):
    body = {"model": "nobody", **GOOD[CHAT]}
    response = httpx.post(f"{server.base_url}{CHAT}", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("drafting", [ITS_OWN, ADAPTIVE], indirect=True)
def test_beside_and_after_all_of_it_the_server_answers_as_before(drafting: Server):
    body = {"model": MODEL, "temperature": 0, "max_tokens": 16, **GOOD[CHAT]}

    def ask() -> Any:
        response = httpx.post(f"{drafting.base_url}{CHAT}", json=body, timeout=60)
        return response.json()["choices"][0]["message"]["content"]

    before = ask()
    with ThreadPoolExecutor(1) as pool:
        beside = [pool.submit(ask) for _ in range(4)]
        for path, added, _ in BAD.values():
            bad = {"model": MODEL, "max_tokens": 5, **GOOD[path], **added}
            response = httpx.post(f"{drafting.base_url}{path}", json=bad, timeout=30)
            assert response.is_error
        assert [answer.result() for answer in beside] == [before] * 4
    assert ask() == before
    drafting.check_idle()
