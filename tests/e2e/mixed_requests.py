"""Requests of every kind: 64 for one batch, and what must be true of each answer."""

import json
from typing import Any

import jsonschema

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "river": {"type": ["string", "null"], "maxLength": 12},
    },
    "required": ["city", "population", "river"],
    "additionalProperties": False,
}
ROWS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "maximum": 99},
            "ok": {"type": "boolean"},
        },
        "required": ["id", "ok"],
        "additionalProperties": False,
    },
}
CHOICES = ["a quiet river", "a quiet river in winter", "none of them"]
# fmt: off
WORDS = [
    "river", "mountain", "engine", "garden", "music", "winter", "bridge", "letter",
    "planet", "coffee", "window", "forest", "market", "silver", "island", "doctor",
]
# fmt: on
THE, COMMA, EOS = 260, 28, 2
TEMPERATURES = ({"temperature": 0.0}, {"temperature": 1.0})


def literal(number: int) -> str:
    """Return the only legal answer to a request, nearly two hundred characters."""
    words = (WORDS[(number + i * 3) % 16] for i in range(24))
    return f"code-{number}: {'-'.join(words)}"


def schema(name: str, value: Any) -> dict[str, Any]:
    body = {"name": name, "schema": value, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": body}}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "filters": {"top_p": 0.95, "top_k": 40, "min_p": 0.01, "logprobs": True},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.2},
    "penalties": {
        "frequency_penalty": -0.3,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logprobs": True,
    },
    "bias": {"logit_bias": {str(THE): 4.0, str(COMMA): -100.0}},
    "allowed": {"allowed_token_ids": list(range(250, 900)), "logprobs": True},
    "bad words": {"bad_words": [" the", " a", "and", " of"]},
    "min tokens": {"min_tokens": 12, "logit_bias": {str(EOS): 100.0}},
    "past the end": {
        "ignore_eos": True,
        "logit_bias": {str(EOS): 10.0},
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "stop": {"stop": [" the", " of", "and "], "logprobs": True},
    "stop kept": {
        "stop": ["e", "ing"],
        "include_stop_str_in_output": True,
        "min_tokens": 6,
    },
    "stop ids": {"stop_token_ids": list(range(253, 300))},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "chosen logprobs": {"logprobs": True, "logprob_token_ids": [THE, COMMA]},
    "tokens as ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "prompt logprobs": {"prompt_logprobs": 1},
    "n": {"n": 2},
    "n with logprobs": {"n": 2, "logprobs": True, "top_logprobs": 1},
    "end of a prompt": {"truncate_prompt_tokens": 40, "add_special_tokens": True},
    "no drafts": {"num_speculative_tokens": 0},
    "one draft": {"num_speculative_tokens": 1, "cache_salt": "own"},
    "literal": {"max_tokens": 120},
    "city": schema("city", CITY) | {"max_tokens": 60, "logprobs": True},
    "rows": schema("rows", ROWS) | {"max_tokens": 40, "n": 2},
    "choice": {"structured_outputs": {"choice": CHOICES}},
    "grammar": {"structured_outputs": {"grammar": 'start: "<" /[a-z]{2,9}/ ">"'}},
    "object": {"structured_outputs": {"json_object": True}},
}
NUM_REQUESTS = len(KINDS) * len(TEMPERATURES)
# What says nothing about how an answer is sampled, or of a prompt.
_UNSAMPLED = {
    "model", "messages", "stream", "stream_options", "priority", "request_id", "echo",
    "add_generation_prompt", "continue_final_message", "documents", "chat_template",
    "chat_template_kwargs", "reasoning_effort", "max_completion_tokens",
    "return_token_ids",
}  # fmt: skip


def kind_of(number: int) -> str:
    return [*KINDS][number % len(KINDS)]


def make_request(number: int) -> dict[str, Any]:
    """Return the request of a number: each kind greedy, and then each kind seeded."""
    kind = kind_of(number)
    topic = f"{WORDS[number % 16]} and {WORDS[number * 7 % 16]}"
    # A wrong literal and a wrong object: n-grams copy them where a grammar forbids it.
    tempting = f"{literal(number)[:24]} {literal(number + 2)[:24]} " + '{"city": 7} '
    prompt = f"{number}: write about {topic}."
    if number % 4 == 3:
        prompt = tempting * 5 + prompt
    elif kind in ("literal", "city", "rows", "object"):
        prompt = tempting + prompt
    request = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 12 + number % 3 * 3,
        "seed": number,
        "return_token_ids": True,
    }
    if kind == "literal":
        request["structured_outputs"] = {"regex": literal(number)}
    return request | TEMPERATURES[number // len(KINDS)] | KINDS[kind]


def count_uses() -> dict[str, int]:
    """Return how many of the requests use each sampling parameter of a chat."""
    requests = [make_request(number) for number in range(NUM_REQUESTS)]
    names = set(ChatCompletionRequest.model_fields) - _UNSAMPLED
    return {name: sum(name in request for request in requests) for name in names}


def check_answer(number: int, answer: dict[str, Any]) -> None:
    """Check what is known of an answer without another one (O3, O4, O5)."""
    request, kind = make_request(number), kind_of(number)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [*range(request.get("n", 1))]
    counts = [len(choice["token_ids"]) for choice in choices]
    assert sum(counts) == answer["usage"]["completion_tokens"]
    assert max(counts) <= request["max_tokens"]
    for choice, count in zip(choices, counts, strict=True):
        if request.get("logprobs"):
            assert len(choice["logprobs"]["content"]) == count
        text, reason = choice["message"]["content"], choice["finish_reason"]
        if reason == "length":
            assert count == request["max_tokens"]
        if kind == "literal":
            assert (text, reason) == (literal(number), "stop")
        elif kind in ("city", "rows") and reason == "stop":
            jsonschema.validate(json.loads(text), CITY if kind == "city" else ROWS)
        elif kind == "choice":
            assert text in CHOICES
