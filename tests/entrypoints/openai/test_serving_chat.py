import asyncio
import json
from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import (
    FakeEngine,
    make_app,
    make_fake_config,
    make_fake_tokenizer,
)
from tests.entrypoints.openai.serving import call, read_events

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
# h-e-l-l is one token, then one a character, then the end of the sequence.
NUM_TOKENS = 6


async def chat(engine: FakeEngine | None = None, **fields: Any) -> Any:
    flags = fields.pop("flags", {})
    body = {"messages": HI} | fields
    return await call(make_app(engine, **flags), PATH, body)


async def test_answer_has_the_shape_of_the_api() -> None:
    response = await chat()
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"].startswith("vllm-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "hell yes"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None


async def test_usage_counts_prompt_and_answer() -> None:
    engine = FakeEngine()
    usage = (await chat(engine)).json()["usage"]
    assert usage["prompt_tokens"] == len(engine.prompts[0])
    assert usage["completion_tokens"] == NUM_TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + NUM_TOKENS
    assert usage["prompt_tokens_details"] is None


async def test_cached_tokens_are_told_with_the_flag() -> None:
    engine = FakeEngine(num_cached_tokens=16)
    response = await chat(engine, flags={"enable_prompt_tokens_details": True})
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_prompt_is_the_rendered_template_without_added_special_tokens() -> None:
    engine = FakeEngine()
    await chat(engine)
    text = engine.tokenizer.decode(engine.prompts[0], skip_special_tokens=False)
    assert text == "<|im_start|>user: hi<|im_start|>assistant: "


async def test_continue_final_message_leaves_the_last_message_open() -> None:
    engine = FakeEngine()
    messages = [*HI, {"role": "assistant", "content": "Well"}]
    await chat(engine, messages=messages, continue_final_message=True)
    text = engine.tokenizer.decode(engine.prompts[0], skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant: Well")


async def test_template_kwargs_of_the_request_win_over_the_flags() -> None:
    engine = FakeEngine()
    flags = {"default_chat_template_kwargs": {"style": "plain"}}
    await chat(engine, flags=flags)
    await chat(engine, flags=flags, chat_template_kwargs={"style": "grand"})
    texts = [engine.tokenizer.decode(ids, False) for ids in engine.prompts]
    assert texts[0].endswith("plain")
    assert texts[1].endswith("grand")


async def test_text_parts_are_joined_for_a_template_of_strings() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(engine, messages=[{"role": "user", "content": parts}])
    assert "user: a\nb<" in engine.tokenizer.decode(engine.prompts[0], False)


async def test_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    events = read_events(await chat(stream=True))
    first, last = events[0]["choices"][0], events[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["finish_reason"] == "stop"
    assert events[-1]["system_fingerprint"].startswith("vllm-")
    assert all(event["object"] == "chat.completion.chunk" for event in events)


async def test_every_chunk_has_finish_reason_and_logprobs() -> None:
    for event in read_events(await chat(stream=True)):
        (choice,) = event["choices"]
        assert {"finish_reason", "logprobs", "index", "delta"} <= set(choice)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "l y"])
async def test_deltas_join_to_the_answer(tokens_per_step: int, stop: str) -> None:
    fields = {"stop": stop, "n": 2, "logprobs": True, "return_token_ids": True}
    whole = (await chat(FakeEngine(answer="hell yés €"), **fields)).json()
    engine = FakeEngine(answer="hell yés €", tokens_per_step=tokens_per_step)
    events = read_events(await chat(engine, stream=True, **fields))
    for expected in whole["choices"]:
        parts = [
            event["choices"][0]
            for event in events
            if event["choices"][0]["index"] == expected["index"]
        ]
        text = "".join(part["delta"]["content"] for part in parts)
        assert text == expected["message"]["content"]
        ids = [i for part in parts for i in part.get("token_ids") or []]
        assert ids == expected["token_ids"]
        content = [
            entry
            for part in parts
            if part["logprobs"]
            for entry in part["logprobs"]["content"]
        ]
        assert content == expected["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]


async def test_usage_is_the_last_chunk_and_null_in_the_others() -> None:
    response = await chat(stream=True, stream_options={"include_usage": True})
    *chunks, last = read_events(response)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS


async def test_usage_is_absent_unless_asked_for() -> None:
    assert all("usage" not in event for event in read_events(await chat(stream=True)))


async def test_usage_can_be_forced_by_the_flag() -> None:
    response = await chat(stream=True, flags={"enable_force_include_usage": True})
    assert read_events(response)[-1]["usage"]["completion_tokens"] == NUM_TOKENS


async def test_continuous_usage_counts_tokens_also_when_several_come_at_once() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    engine = FakeEngine(tokens_per_step=4)
    events = read_events(await chat(engine, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [0, 4, 6, 6]


async def test_logprobs_have_one_entry_a_token() -> None:
    answer = (await chat(logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == NUM_TOKENS
    assert content[0]["token"] == "hell"
    assert content[0]["bytes"] == list(b"hell")
    assert content[0]["logprob"] == -0.5
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["hell", "x"]


async def test_minus_infinity_becomes_the_floor() -> None:
    answer = (await chat(logprobs=True, top_logprobs=4)).json()
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert top[-1] == {"token": "z", "logprob": -9999.0, "bytes": [ord("z")]}


@pytest.mark.parametrize("fields", [{}, {"logprobs": None}, {"logprobs": False}])
async def test_logprobs_left_out_null_or_false_are_none(fields: dict) -> None:
    response = await chat(**fields)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None


async def test_top_logprobs_zero_or_null_shows_the_token_alone() -> None:
    for top_logprobs in (0, None):
        response = await chat(logprobs=True, top_logprobs=top_logprobs)
        (entry, *_) = response.json()["choices"][0]["logprobs"]["content"]
        assert entry["logprob"] == -0.5
        assert entry["top_logprobs"] == []


async def test_parts_of_a_character_have_their_own_bytes() -> None:
    response = await chat(FakeEngine(answer="é"), logprobs=True)
    choice = response.json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "é"
    assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]


async def test_chosen_token_ids_replace_the_likeliest() -> None:
    wanted = FakeEngine().tokenizer.encode("yx")
    response = await chat(logprobs=True, logprob_token_ids=wanted)
    top = response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["token"] for entry in top] == ["y", "x"]


async def test_tokens_can_be_written_as_ids() -> None:
    response = await chat(logprobs=True, return_tokens_as_token_ids=True)
    entry = response.json()["choices"][0]["logprobs"]["content"][0]
    first_id = FakeEngine().answer_ids()[0]
    assert entry["token"] == f"token_id:{first_id}"
    assert entry["bytes"] == list(b"hell")


async def test_token_ids_of_prompt_and_answer_are_returned() -> None:
    engine = FakeEngine()
    answer = (await chat(engine, return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == engine.prompts[0]
    assert answer["choices"][0]["token_ids"] == engine.answer_ids()


async def test_streamed_prompt_token_ids_come_once() -> None:
    engine = FakeEngine()
    events = read_events(await chat(engine, stream=True, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == engine.prompts[0]
    assert all("prompt_token_ids" not in event for event in events[1:])


async def test_prompt_logprobs_are_returned_by_position() -> None:
    engine = FakeEngine()
    answer = (await chat(engine, prompt_logprobs=1)).json()
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(engine.prompts[0])
    own = rows[1][str(engine.prompts[0][1])]
    assert own["logprob"] == -3.0
    assert own["decoded_token"] == "u"


async def test_stop_string_is_the_stop_reason() -> None:
    answer = (await chat(stop=["ye"])).json()
    assert answer["choices"][0]["message"]["content"] == "hell "
    assert answer["choices"][0]["stop_reason"] == "ye"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_either_limit_cuts_the_answer(name: str) -> None:
    answer = (await chat(**{name: 2})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


async def test_defaults_come_from_request_then_model_then_api() -> None:
    defaults = {"temperature": 0.3, "top_p": 0.8, "max_tokens": 3}
    config = make_fake_config(default_sampling_params=defaults)
    engine = FakeEngine(vllm_config=config)
    await chat(engine, temperature=0.7)
    (params,) = engine.params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.8, 0)
    assert params.max_tokens == 3


async def test_json_schema_reaches_the_engine() -> None:
    engine = FakeEngine()
    schema = {"type": "object"}
    body = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    await chat(engine, response_format=body)
    assert engine.params[0].structured_outputs.json == schema


async def test_logit_bias_keys_become_token_ids() -> None:
    engine = FakeEngine()
    await chat(engine, logit_bias={"5": -100})
    assert engine.params[0].logit_bias == {5: -100}


async def test_two_requests_may_have_the_same_id() -> None:
    engine = FakeEngine(step_delay_s=0.01)
    app = make_app(engine)
    body = {"messages": HI, "request_id": "mine"}
    responses = await asyncio.gather(call(app, PATH, body), call(app, PATH, body))
    assert {response.json()["id"] for response in responses} == {"chatcmpl-mine"}


async def test_reasoning_effort_unknown_to_the_template_is_refused() -> None:
    response = await chat(reasoning_effort="high")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"
    assert (await chat(reasoning_effort="none")).status_code == 200


async def test_template_that_refuses_the_reasoning_effort_answers_400() -> None:
    template = (
        "{% if reasoning_effort not in ['low'] %}"
        "{{ raise_exception('unknown effort') }}{% endif %}hi"
    )
    tokenizer = make_fake_tokenizer(template)
    response = await chat(FakeEngine(tokenizer=tokenizer), reasoning_effort="absurd")
    assert response.status_code == 400
    assert "unknown effort" in response.json()["error"]["message"]
    response = await chat(FakeEngine(tokenizer=tokenizer), reasoning_effort="low")
    assert response.status_code == 200


async def test_model_without_template_answers_400() -> None:
    response = await chat(FakeEngine(tokenizer=make_fake_tokenizer(None)))
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]


async def test_template_of_a_request_needs_the_flag() -> None:
    template = "{{ messages[0].content }}!"
    response = await chat(chat_template=template)
    assert response.json()["error"]["param"] == "chat_template"
    engine = FakeEngine()
    flags = {"trust_request_chat_template": True}
    await chat(engine, chat_template=template, flags=flags)
    assert engine.tokenizer.decode(engine.prompts[0]) == "hi!"


async def test_template_of_a_request_runs_in_the_sandbox() -> None:
    response = await chat(
        chat_template="{{ ''.__class__.__mro__ }}",
        flags={"trust_request_chat_template": True},
    )
    assert response.status_code == 400


async def test_text_is_utf8_in_the_body() -> None:
    response = await chat(FakeEngine(answer="日本語 ☕"))
    assert "日本語 ☕" in response.content.decode()
    assert json.loads(response.content)["choices"][0]["message"]["content"] == (
        "日本語 ☕"
    )
