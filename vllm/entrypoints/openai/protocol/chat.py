"""Requests to /v1/chat/completions and their answers."""

from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from vllm.entrypoints.openai.limits import MAX_LIST_LENGTH, MAX_MESSAGES
from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    Int64,
    Name,
    PromptLogprobsList,
    UsageInfo,
)
from vllm.entrypoints.openai.protocol.metrics import RequestMetrics
from vllm.exceptions import VLLMValidationError

# Checked by `chat_messages.py`, which can say more than a schema.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {
                                    "type": {"const": "text"},
                                    "text": {"type": "string"},
                                },
                                "required": ["type", "text"],
                            },
                        },
                    ]
                },
                "name": {"type": "string"},
            },
            "required": ["role", "content"],
        }
    ),
]
Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
Documents = Annotated[
    list[dict[str, Any]], Field(max_length=MAX_LIST_LENGTH, fail_fast=True)
]


class ChatCompletionRequest(GenerationRequest):
    """Messages to answer."""

    messages: Messages
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None

    def check(self) -> None:
        """Refuse what does not fit together.

        Raises:
            VLLMValidationError: of the field that does not fit.
        """
        self.check_stream()
        if self.echo:
            raise VLLMValidationError(
                "echo is not supported in chat: use continue_final_message",
                parameter="echo",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise VLLMValidationError(f"{name} needs logprobs=true", parameter=name)
        limits = (self.max_tokens, self.max_completion_tokens)
        for name, limit in zip(
            ("max_tokens", "max_completion_tokens"), limits, strict=True
        ):
            if limit is not None and limit < 1:
                raise VLLMValidationError(
                    f"{name} must be at least 1, got {limit}", parameter=name
                )
        if None not in limits and limits[0] != limits[1]:
            raise VLLMValidationError(
                "max_tokens and max_completion_tokens contradict each other: send one",
                parameter="max_completion_tokens",
            )

    @property
    def num_logprobs(self) -> int | None:
        """Candidates beside the sampled token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer, by either name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def field_of(self, parameter: str | None) -> str | None:
        """Return the field of this request that a sampling parameter came from."""
        if parameter == "logprobs":
            return "top_logprobs"
        if parameter == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().field_of(parameter)


class ChatLogprob(msgspec.Struct):
    """A token that could have come.

    Args:
        logprob: -9999.0 stands for minus infinity.
        bytes: of the token, which may be a part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The token that came, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(msgspec.Struct):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: UsageInfo
    prompt_logprobs: PromptLogprobsList | None = None
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    """What is new in a chunk."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    """What is new in one of the n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | None | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None | msgspec.UnsetType = msgspec.UNSET
    usage: UsageInfo | None | msgspec.UnsetType = msgspec.UNSET
    metrics: RequestMetrics | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None | msgspec.UnsetType = msgspec.UNSET
