"""Requests to /tokenize, /detokenize and /v1/models, and their answers."""

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from vllm.entrypoints.openai.protocol.chat import Messages
from vllm.entrypoints.openai.protocol.common import IntList, Name
from vllm.entrypoints.openai.protocol.refused import check_extra_fields
from vllm.exceptions import VLLMValidationError


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: Name | None = None

    def unknown_fields(self) -> list[str]:
        """Return the fields that have no effect because nothing knows them.

        Raises:
            VLLMValidationError: a field asks for something that is not done here.
        """
        return check_extra_fields(self.model_extra or {})


class TokenizeRequest(_Request):
    """A text or messages to turn into token ids: exactly one of the two."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what does not fit together.

        Raises:
            VLLMValidationError: of the field that does not fit.
        """
        if (self.prompt is None) == (self.messages is None):
            raise VLLMValidationError(
                "send exactly one of prompt and messages", parameter="prompt"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )


class DetokenizeRequest(_Request):
    """Token ids to turn into text."""

    tokens: IntList

    def check(self) -> None:
        """Every list of ids fits; the serving class knows the vocabulary."""


class TokenizeResponse(msgspec.Struct):
    """Token ids, and how many the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text."""

    prompt: str


class ModelPermission(msgspec.Struct, kw_only=True):
    """What may be done with a model: a fixed part of OpenAI's answer."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """A name that the server answers to."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    """All names that the server answers to."""

    data: list[ModelCard]
    object: str = "list"
