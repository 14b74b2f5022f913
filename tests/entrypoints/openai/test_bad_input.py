"""What a client can send wrong is a 400 with the field's name; the engine goes on."""

import json
import logging
import socket
from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import call, connect

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


async def refused(path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """Return the error of a request that must fail and leave the engine as it was."""
    engine = FakeEngine()
    app = make_app(engine)
    response = await call(app, path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert engine.num_running == 0
    healthy = await call(app, COMPLETIONS, {"prompt": "a"})
    assert healthy.json()["choices"][0]["text"] == "hell yes"
    return error


async def refused_chat(**fields: Any) -> dict[str, Any]:
    return await refused(CHAT, {"messages": HI} | fields)


async def refused_completion(**fields: Any) -> dict[str, Any]:
    return await refused(COMPLETIONS, {"prompt": "a"} | fields)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]),
        ("tools", []),
        ("tool_choice", "required"),
        ("tool_choice", TOOL),
        ("functions", [{"name": "f"}]),
        ("use_beam_search", True),
        ("logits_processors", ["x"]),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "root ::= 'a'"),
        ("best_of", 3),
        ("thinking_token_budget", 20),
        ("kv_transfer_params", {}),
        ("lora_request", {"name": "x"}),
        ("suffix", "end"),
        ("echo", True),
        ("structural_tag", {}),
        ("service_tier", "priority"),
        ("store", True),
        ("modalities", ["audio"]),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("include_reasoning", False),
    ],
)
async def test_field_that_is_not_served_is_named(name: str, value: Any) -> None:
    error = await refused_chat(**{name: value})
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("json", "json"),
        ("regex", "regex"),
        ("choice", "choice"),
        ("grammar", "grammar"),
    ],
)
async def test_legacy_constraint_names_its_replacement(old: str, new: str) -> None:
    error = await refused_completion(**{f"guided_{old}": "x"})
    assert f"structured_outputs.{new}" in error["message"]


async def test_a_text_of_megabytes_is_refused_by_its_field() -> None:
    text = "hell yes " * 200_000
    error = await refused_completion(prompt=["a", text])
    assert (error["param"], "characters" in error["message"]) == ("prompt", True)
    error = await refused_chat(messages=[{"role": "user", "content": text}])
    assert (error["param"], "characters" in error["message"]) == ("messages", True)
    error = await refused_completion(prompt=text, truncate_prompt_tokens=5)
    assert error["param"] == "prompt"
    error = await refused("/tokenize", {"prompt": text})
    assert error["param"] == "prompt"


async def test_fields_without_effect_by_definition_are_accepted() -> None:
    body = {
        "messages": HI,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": None,
        "best_of": 1,
        "echo": False,
        "use_beam_search": False,
    }
    response = await call(make_app(), CHAT, body)
    assert response.status_code == 200, response.text
    assert "X-vLLM-Ignored-Fields" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(stream: bool) -> None:
    body = {"prompt": "a", "temprature": 0, "x\r\nSet-Cookie: y": 1, "stream": stream}
    response = await call(make_app(), COMPLETIONS, body)
    assert response.status_code == 200
    named = response.headers["X-vLLM-Ignored-Fields"]
    assert named == "temprature, x??Set-Cookie??y"
    assert "Set-Cookie" not in response.headers


async def test_unknown_fields_are_logged_once_a_name() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.entrypoints.openai.request_body")
    logger.addHandler(handler)
    app = make_app()
    for _ in range(2):
        await call(app, COMPLETIONS, {"prompt": "a", "temprature": 0})
    logger.removeHandler(handler)
    assert lines == ["Unknown request fields, ignored: temprature"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 1}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"request_id": "a b"}, "request_id"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("refuse", [refused_chat, refused_completion])
async def test_parameter_outside_its_bounds_is_named(
    refuse: Any, fields: dict[str, Any], param: str
) -> None:
    assert (await refuse(**fields))["param"] == param


@pytest.mark.parametrize("token_id", [-1, 100_000, 2**40])
@pytest.mark.parametrize(
    "name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"]
)
async def test_token_id_outside_the_vocabulary_is_named(
    name: str, token_id: int
) -> None:
    value: Any = {str(token_id): 1} if name == "logit_bias" else [token_id]
    error = await refused_completion(**{name: value, "logprobs": 1})
    assert error["param"] == name


@pytest.mark.parametrize("token_id", [-1, 100_000, 2**40, 2**70])
async def test_prompt_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    error = await refused(COMPLETIONS, {"prompt": [token_id]})
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "prompt", [None, [], "", [[]], [True], [1.5], ["a", 1], [[1], "a"], 5, {}, [["a"]]]
)
async def test_prompt_of_a_wrong_type_is_refused(prompt: Any) -> None:
    assert (await refused(COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


async def test_missing_prompt_is_refused() -> None:
    error = await refused(COMPLETIONS, {})
    assert error["param"] == "prompt"
    assert error["type"] == "Bad Request"


async def test_too_many_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_COMPLETION_PROMPTS", "2")
    error = await refused(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert error["param"] == "prompt"


async def test_too_many_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "5")
    error = await refused(COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2})
    assert error["param"] == "n"


async def test_too_long_prompt_is_refused() -> None:
    error = await refused(COMPLETIONS, {"prompt": "a" * 5000})
    assert error["param"] == "prompt"
    assert "4096" in error["message"]


async def test_unknown_model_is_404() -> None:
    error = await refused(CHAT, {"messages": HI, "model": "gpt-9"}, status=404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "wizard", "content": "hi"}], "messages.0.role"),
        ([{"role": ["user"], "content": "hi"}], "messages.0.role"),
        ([*HI, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages.0.content.0.text",
        ),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [TOOL]}],
            "messages.0.tool_calls",
        ),
        ([{"role": "user", "content": "refuse"}], "messages"),
    ],
)
async def test_message_that_cannot_be_rendered_is_named(
    messages: Any, param: str
) -> None:
    error = await refused(CHAT, {"messages": messages})
    assert (error["param"] or "").startswith(param.partition(".")[0])
    assert param in (error["param"], error["message"].partition(":")[0])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "first"}, *HI],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HI],
        [{"role": "developer", "content": "a"}, *HI],
        [{"role": "user", "content": ""}],
    ],
)
async def test_unusual_order_of_messages_is_for_the_template_to_judge(
    messages: Any,
) -> None:
    response = await call(make_app(), CHAT, {"messages": messages})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/canary"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/"}},
    ],
)
async def test_parts_that_are_not_text_are_refused_and_nothing_is_fetched(
    part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*args: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", forbid)
    error = await refused(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert part["type"] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": None},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "json": {"type": "object"}}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
        ),
        (
            {"response_format": {"type": "json_object"}, "tool_choice": "required"},
            "tool_choice",
        ),
    ],
)
async def test_contradictory_or_broken_constraint_is_named(
    fields: dict[str, Any], param: str
) -> None:
    error = await refused_chat(**fields)
    assert error["param"].startswith(param)


async def test_contradictory_chat_fields_are_named() -> None:
    for fields, param in (
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ):
        assert (await refused_chat(**fields))["param"] == param


async def post_raw(body: bytes, headers: dict[str, str] = JSON) -> Any:
    async with connect(make_app()) as client:
        return await client.post(COMPLETIONS, content=body, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    ],
)
async def test_body_that_is_no_request_is_400(body: bytes) -> None:
    response = await post_raw(body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == 400


@pytest.mark.parametrize("field", [b"unknown", b"prompt", b"response_format"])
async def test_deep_nesting_is_400(field: bytes) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    response = await post_raw(b'{"prompt": "a", "' + field + b'": ' + deep + b"}")
    assert response.status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "", "multipart/form-data"])
async def test_body_that_is_not_json_by_its_type_is_415(content_type: str) -> None:
    response = await post_raw(b'{"prompt": "a"}', {"Content-Type": content_type})
    assert response.status_code == 415


async def test_content_type_may_name_a_charset() -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert (await post_raw(b'{"prompt": "a"}', headers)).status_code == 200


async def test_too_large_body_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HTTP_MAX_BODY_BYTES", "2000")
    response = await post_raw(json.dumps({"prompt": "a" * 3000}).encode())
    assert response.status_code == 413


async def test_too_large_body_without_a_length_is_413(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HTTP_MAX_BODY_BYTES", "2000")

    async def parts() -> Any:
        for _ in range(30):
            yield b" " * 100

    async with connect(make_app()) as client:
        response = await client.post(COMPLETIONS, content=parts(), headers=JSON)
    assert response.status_code == 413


async def test_answer_to_a_large_bad_body_is_small() -> None:
    many = ", ".join('{"role": 5}' for _ in range(3000))
    bodies = [
        f'{{"prompt": "a", "stop": [{"1, " * 100_000}1]}}',
        f'{{"prompt": "a", "temperature": "{"x" * 1_000_000}"}}',
        f'{{"prompt": "a", "logit_bias": {{"{"x" * 100_000}": 1}}}}',
        f'{{"messages": [{many}]}}',
    ]
    for body in bodies:
        response = await post_raw(body.encode())
        assert response.status_code == 400
        assert len(response.content) < 4000


async def test_no_more_than_ten_errors_are_listed() -> None:
    body = {f"{name}": "x" for name in ("temperature", "top_p", "top_k", "min_p", "n")}
    body |= dict.fromkeys(("seed", "max_tokens", "min_tokens", "logprobs"), "x")
    body |= dict.fromkeys(("presence_penalty", "frequency_penalty", "priority"), "x")
    error = await refused(COMPLETIONS, body)
    assert error["message"].count("(got 'x')") == 10
    assert "and 3 more" in error["message"]


async def test_failure_inside_tells_no_secrets() -> None:
    response = await call(
        make_app(FakeEngine(fails_after=0)), COMPLETIONS, {"prompt": "a"}
    )
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text


@pytest.mark.parametrize("path", ["/nope", "/v1/nope"])
async def test_unknown_path_is_404_with_the_error_object(path: str) -> None:
    response = await call(make_app(), path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == 404


async def test_wrong_method_is_405_with_the_error_object() -> None:
    response = await call(make_app(), CHAT)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == 405
