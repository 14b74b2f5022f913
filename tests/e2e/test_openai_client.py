"""The first steps of a new user, with the official client."""

import json

import jsonschema

from tests.e2e.conftest import MODEL

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def chat(client, **kwargs):
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0} | kwargs
    return client.chat.completions.create(**arguments)


def test_the_embedded_model_is_listed(client):
    assert [model.id for model in client.models.list().data] == [MODEL]


def test_a_chat_answers(client):
    answer = chat(client, max_completion_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_streamed_chat_is_the_same_answer(client):
    whole = chat(client, max_completion_tokens=40)
    chunks = list(
        chat(
            client,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]


def test_a_json_schema_answer_validates(client):
    answer = chat(
        client,
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        max_completion_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON_SCHEMA)


def test_logprobs_are_one_entry_a_token(client):
    answer = chat(client, max_completion_tokens=20, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        # Greedy: the sampled token is the most likely one.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert -20 < entry.logprob <= 0
    content = b"".join(bytes(entry.bytes) for entry in entries)
    assert content.decode().startswith(answer.choices[0].message.content)


def test_streamed_logprobs_equal_the_whole_ones(client):
    whole = chat(client, max_completion_tokens=12, logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for chunk in chat(
            client, max_completion_tokens=12, logprobs=True, top_logprobs=2, stream=True
        )
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.choices[0].logprobs.content


def test_completion_echo_scores_its_own_output(client):
    """O2: the output's log-probabilities agree with a re-score of prompt + output."""
    prompt = "The sun rises in the"
    first = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=10, temperature=0, logprobs=1
    )
    again = client.completions.create(
        model=MODEL,
        prompt=prompt + first.choices[0].text,
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    generated = first.choices[0].logprobs.token_logprobs
    rescored = again.choices[0].logprobs.token_logprobs[-len(generated) :]
    assert again.choices[0].logprobs.token_logprobs[0] is None
    for one, other in zip(generated, rescored, strict=True):
        assert abs(one - other) < 1e-3
