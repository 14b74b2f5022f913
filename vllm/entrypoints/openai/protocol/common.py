"""Request fields and answer parts that completions and chat share."""

import re
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from vllm.entrypoints.openai.limits import MAX_LIST_LENGTH, MAX_NAME_LENGTH
from vllm.entrypoints.openai.protocol.refused import check_extra_fields
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
# fail_fast: one error a list, or a body of bad items would grow into a huge answer.
StrList = Annotated[list[str], Field(max_length=MAX_LIST_LENGTH, fail_fast=True)]
IntList = Annotated[list[Int64], Field(max_length=MAX_LIST_LENGTH, fail_fast=True)]

_TOKEN_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
# Request field -> sampling parameter, where a model's defaults fill what is left out.
_WITH_MODEL_DEFAULT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "num_speculative_tokens",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(_Strict):
    """A schema with its name; `strict` false is enforced just the same."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of the answer, in OpenAI's words."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    # Of `structural_tag`, so that its refusal names the type and not these.
    format: Any = None
    structures: Any = None
    triggers: Any = None

    def to_structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the constraint, or None for free text.

        Raises:
            VLLMValidationError: the type is unknown or its body is missing.
        """
        if self.type == "json_schema":
            schema = self.json_schema.schema_ if self.json_schema else None
            if schema is None:
                raise VLLMValidationError(
                    "response_format of type json_schema needs json_schema.schema, an "
                    "object",
                    parameter="response_format.json_schema.schema",
                )
            if not isinstance(schema, (dict, bool)):
                raise VLLMValidationError(
                    "response_format.json_schema.schema must be an object",
                    parameter="response_format.json_schema.schema",
                )
            return StructuredOutputsParams(json=schema)
        if self.type == "structural_tag":
            raise VLLMValidationError(
                "response_format of type structural_tag is not supported: use "
                "json_schema",
                parameter="response_format.type",
            )
        if self.json_schema is not None:
            raise VLLMValidationError(
                "response_format.json_schema needs type json_schema, not "
                f"{self.type[:40]!r}",
                parameter="response_format.type",
            )
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "text":
            return None
        raise VLLMValidationError(
            "response_format.type must be text, json_object or json_schema, got "
            f"{self.type[:40]!r}",
            parameter="response_format.type",
        )


class StructuredOutputs(_Strict):
    """Exactly one constraint on the form of the answer."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: StrList | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def to_params(self) -> StructuredOutputsParams:
        """Return the constraint.

        Raises:
            VLLMValidationError: not exactly one is given, or it is of a wrong type.
        """
        if self.structural_tag is not None:
            raise VLLMValidationError(
                "structured_outputs.structural_tag is not supported: use json",
                parameter="structured_outputs.structural_tag",
            )
        return StructuredOutputsParams(
            json=self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object,
            disable_any_whitespace=self.disable_any_whitespace,
            disable_additional_properties=self.disable_additional_properties,
            whitespace_pattern=self.whitespace_pattern,
        )


class GenerationRequest(BaseModel):
    """The fields that every request for text has.

    Numbers are only typed here; `SamplingParams` checks their bounds.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: Name | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: Int64 | None = None
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: str | StrList | None = None
    stop_token_ids: IntList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: IntList | None = None
    num_speculative_tokens: Int64 | None = None
    bad_words: StrList | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    logprob_token_ids: IntList | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    request_id: Name | None = None
    cache_salt: Name | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    def unknown_fields(self) -> list[str]:
        """Return the fields that have no effect because nothing knows them.

        Raises:
            VLLMValidationError: a field asks for something that is not done here.
        """
        names = check_extra_fields(self.model_extra or {})
        if self.stream_options is not None:
            extra = self.stream_options.model_extra or {}
            names += [f"stream_options.{name}" for name in extra]
        return names

    def check_stream(self) -> None:
        """Refuse combinations that a stream cannot answer.

        Raises:
            VLLMValidationError: of the field that does not fit.
        """
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError(
                "stream_options needs stream=true", parameter="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise VLLMValidationError(
                "prompt_logprobs cannot be streamed: send stream=false",
                parameter="prompt_logprobs",
            )

    @property
    def num_choices(self) -> int:
        """Answers a prompt."""
        return 1 if self.n is None else self.n

    def sampling_params(
        self,
        defaults: dict[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Join the request, the model's defaults and those of the API.

        Args:
            defaults: by sampling parameter, of the model's generation_config.json.
            max_tokens: None: as many as the context takes.

        Raises:
            VLLMValidationError: a value is outside its bounds.
        """
        values = {
            name: defaults.get(name)
            for name in _WITH_MODEL_DEFAULT
            if getattr(self, name) is None
        }
        values |= {
            name: getattr(self, name)
            for name in (*_WITH_MODEL_DEFAULT, *_PLAIN)
            if getattr(self, name) is not None
        }
        return SamplingParams.from_optional(
            **values,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self._logit_bias(),
            structured_outputs=self._structured_outputs(),
            output_kind=RequestOutputKind.DELTA
            if self.stream
            else RequestOutputKind.FINAL_ONLY,
        )

    def field_of(self, parameter: str | None) -> str | None:
        """Return the field of this request that a sampling parameter came from."""
        is_constraint = (parameter or "").startswith("structured_outputs.")
        if is_constraint and self.response_format is not None:
            return "response_format.json_schema.schema"
        return parameter

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not _TOKEN_ID.fullmatch(key):
                raise VLLMValidationError(
                    f"logit_bias takes token ids as keys, got {key[:40]!r}",
                    parameter="logit_bias",
                )
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        constraint = None
        if self.response_format is not None:
            constraint = self.response_format.to_structured_outputs()
        if self.structured_outputs is None:
            return constraint
        if constraint is not None:
            raise VLLMValidationError(
                "response_format and structured_outputs both constrain the answer: "
                "send one of them",
                parameter="structured_outputs",
            )
        return self.structured_outputs.to_params()


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageInfo(msgspec.Struct):
    """Tokens of a request: its prompts once, all its answers."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(msgspec.Struct):
    """The log-probability of one token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# One a position: token id -> log-probability; the first position has none.
PromptLogprobsList = list[dict[int, PromptLogprob] | None]
