"""Requests to /v1/completions and their answers."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, WithJsonSchema

from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    Int64,
    PromptLogprobsList,
    UsageInfo,
)
from vllm.entrypoints.openai.protocol.metrics import RequestMetrics
from vllm.exceptions import VLLMValidationError

DEFAULT_MAX_TOKENS = 16

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
# Checked by `prompts`: a union of lists is tried list by list, which is slow for long
# ones and answers with one error a branch.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


def _false_is_none(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """A text, or several, to go on with."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[Int64 | None, BeforeValidator(_false_is_none)] = None

    def check(self) -> None:
        """Refuse what does not fit together.

        Raises:
            VLLMValidationError: of the field that does not fit.
        """
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise VLLMValidationError(
                "max_tokens must be at least 1 without echo", parameter="max_tokens"
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise VLLMValidationError(
                "logprob_token_ids needs logprobs", parameter="logprob_token_ids"
            )

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids.

        Raises:
            VLLMValidationError: there is none, there are too many, or one is of a
                wrong type.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _bad_prompt()
        if len(prompt) > max_prompts:
            raise VLLMValidationError(
                f"prompt takes at most {max_prompts} prompts, got {len(prompt)}",
                parameter="prompt",
            )
        for item in prompt:
            if not isinstance(item, type(prompt[0])):
                raise _bad_prompt()
            if not isinstance(item, str) and not _is_ids(item):
                raise _bad_prompt()
        return prompt


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and abs(item) < 2**63 for item in value)
    )


def _bad_prompt() -> VLLMValidationError:
    return VLLMValidationError(
        "prompt must be a string, a list of token ids, or a non-empty list of either",
        parameter="prompt",
    )


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry for each token.

    Args:
        text_offset: where the token begins in the text, characters.
        token_logprobs: -9999.0 stands for minus infinity; None for the first token of
            an echoed prompt.
        top_logprobs: the most likely tokens and the one that came.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One of the answers: number prompt x n + answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobsList | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: UsageInfo
    metrics: RequestMetrics | None | msgspec.UnsetType = msgspec.UNSET


class CompletionChunkChoice(msgspec.Struct):
    """What is new in one of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str | None | msgspec.UnsetType = msgspec.UNSET
    usage: UsageInfo | None | msgspec.UnsetType = msgspec.UNSET
    metrics: RequestMetrics | None | msgspec.UnsetType = msgspec.UNSET
