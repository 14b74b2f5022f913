"""What a request asks of the sampler, checked as far as it can be without the model."""

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import msgspec

from vllm import envs
from vllm.exceptions import VLLMValidationError

# Below this, softmax(logits / temperature) is one-hot in float32 anyway.
MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
MAX_STOP_CHARS = 1024


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a request holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """One constraint on the form of the output.

    Args:
        json: a JSON schema, as text or as the parsed object (or a boolean schema).
        regex: the whole output matches this pattern.
        choice: the output is one of these strings.
        grammar: a context-free grammar, in Lark or GBNF/EBNF notation.
        json_object: any JSON object.
        disable_any_whitespace: JSON without optional whitespace.
        disable_additional_properties: objects are closed unless their schema says
            otherwise.
        whitespace_pattern: regex for the whitespace between JSON tokens.

    Raises:
        VLLMValidationError: not exactly one constraint is given, or one is empty.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("json", "regex", "choice", "grammar", "json_object")
            if getattr(self, name) is not None
            and getattr(self, name) is not False
            or (name == "json" and self.json is False)
        ]
        if len(given) != 1:
            raise VLLMValidationError(
                "structured_outputs needs exactly one of json, regex, choice, grammar "
                f"and json_object, got {', '.join(given) or 'none'}",
                parameter="structured_outputs",
                value=given,
            )
        self._check_type(given[0])

    def _check_type(self, name: str) -> None:
        value = getattr(self, name)
        expected: dict[str, tuple[type, ...]] = {
            "json": (str, dict, bool),
            "regex": (str,),
            "choice": (list, tuple),
            "grammar": (str,),
            "json_object": (bool,),
        }
        wrong_items = name == "choice" and not (
            isinstance(value, (list, tuple))
            and value
            and all(isinstance(item, str) and item for item in value)
        )
        if not isinstance(value, expected[name]) or wrong_items or value == "":
            detail = {
                "json": "a JSON schema: an object, a boolean or their text",
                "choice": "a non-empty list of non-empty strings",
            }.get(name, "a non-empty string")
            raise VLLMValidationError(
                f"structured_outputs.{name} must be {detail}",
                parameter=f"structured_outputs.{name}",
                value=value,
            )

    @property
    def constraint(self) -> str:
        """The name of the one constraint that is set."""
        if self.json is not None:
            return "json"
        for name in ("regex", "choice", "grammar"):
            if getattr(self, name) is not None:
                return name
        return "json_object"


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How the tokens of one request are chosen, when it ends and what it returns.

    Field names, defaults and meanings are those of the OpenAI API and its vLLM extras;
    `docs/serving/sampling_parameters.md` lists them with their bounds.

    Raises:
        VLLMValidationError: a value is of the wrong type or outside its bounds.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    # 0 or -1: all tokens.
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    # Number of candidates beside the sampled token; -1: the whole vocabulary.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # -1: keep as many tokens as the model's context takes.
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    # Drafts in a step at the most; 0: no speculation for this request.
    num_speculative_tokens: int | None = None
    extra_args: dict[str, Any] | None = None

    # Filled in by the input processor, which knows the tokenizer and the model.
    eos_token_id: int | None = None
    all_stop_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        if self.top_k == -1:
            self.top_k = 0
        self._verify()
        if self.temperature < MIN_TEMPERATURE:
            # Greedy: no filter can change the argmax, so none is run.
            self.temperature = 0.0
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _verify(self) -> None:
        _integer("n", self.n, 1, envs.VLLM_MAX_N_SEQUENCES)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True
        )
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.num_speculative_tokens is not None:
            _integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens "
                f"({self.max_tokens})",
                parameter="min_tokens",
                value=self.min_tokens,
            )
        for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, -1)
        if self.truncate_prompt_tokens == 0:
            raise VLLMValidationError(
                "truncate_prompt_tokens must be -1 or at least 1",
                parameter="truncate_prompt_tokens",
                value=0,
            )
        self._verify_lists()

    def _verify_lists(self) -> None:
        assert isinstance(self.stop, list)
        if len(self.stop) > envs.VLLM_MAX_STOP_STRINGS:
            raise VLLMValidationError(
                f"stop takes at most {envs.VLLM_MAX_STOP_STRINGS} strings, "
                f"got {len(self.stop)}",
                parameter="stop",
            )
        _strings("stop", self.stop, MAX_STOP_CHARS)
        _strings("bad_words", self.bad_words or [], MAX_BAD_WORD_CHARS)
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings need detokenize=True", parameter="stop", value=self.stop
            )
        for name, limit in (
            ("stop_token_ids", MAX_LOGIT_BIAS_TOKENS),
            ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
            ("allowed_token_ids", None),
        ):
            ids = getattr(self, name)
            if ids is not None:
                _token_ids(name, ids, limit)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise VLLMValidationError(
                "allowed_token_ids must not be empty", parameter="allowed_token_ids"
            )
        if len(self.bad_words or []) > MAX_BAD_WORDS:
            raise VLLMValidationError(
                f"bad_words takes at most {MAX_BAD_WORDS} strings",
                parameter="bad_words",
            )
        if self.logit_bias:
            _token_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS_TOKENS)
            for token_id, bias in self.logit_bias.items():
                _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0

    @property
    def num_logprobs(self) -> int | None:
        """Columns of log-probabilities beside the sampled token; None: none wanted."""
        if self.logprob_token_ids:
            return max(self.logprobs or 0, len(self.logprob_token_ids))
        return self.logprobs

    @classmethod
    def from_optional(cls, **kwargs: Any) -> "SamplingParams":
        """Build from keyword arguments of which None means "the default"."""
        nullable = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
        return cls(
            **{
                name: value
                for name, value in kwargs.items()
                if value is not None or name in nullable
            }
        )

    def clone(self) -> "SamplingParams":
        """Return a copy that shares no list with this one."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SamplingParams)


def _integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise VLLMValidationError(
            f"{name} must be an integer, got {value!r}", parameter=name, value=value
        )
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}"
        if maximum is not None:
            bounds += f" and at most {maximum}"
        raise VLLMValidationError(
            f"{name} must be {bounds}, got {value}", parameter=name, value=value
        )


def _number(
    name: str,
    value: Any,
    minimum: float,
    maximum: float,
    parameter: str | None = None,
    *,
    open_low: bool = False,
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = (
        is_number
        and math.isfinite(value)
        and minimum <= value <= maximum
        and not (open_low and value == minimum)
    )
    if not inside:
        bracket = "(" if open_low else "["
        raise VLLMValidationError(
            f"{name} must be a number in {bracket}{minimum}, {maximum}], got {value!r}",
            parameter=parameter or name,
            value=value,
        )


def _strings(name: str, values: list[str], max_chars: int) -> None:
    if not all(isinstance(value, str) and value for value in values):
        raise VLLMValidationError(
            f"{name} must hold non-empty strings", parameter=name, value=values
        )
    longest = max(map(len, values), default=0)
    if longest > max_chars:
        raise VLLMValidationError(
            f"{name} takes strings of at most {max_chars} characters, got {longest}",
            parameter=name,
            value=longest,
        )


def _token_ids(name: str, values: Any, limit: int | None) -> None:
    is_list = isinstance(values, (list, tuple))
    if not is_list or any(
        isinstance(value, bool) or not isinstance(value, int) for value in values
    ):
        raise VLLMValidationError(
            f"{name} must hold token ids, integers", parameter=name, value=values
        )
    if limit is not None and len(values) > limit:
        raise VLLMValidationError(
            f"{name} takes at most {limit} token ids, got {len(values)}",
            parameter=name,
        )


FIELD_NAMES = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
STRUCTURED_OUTPUTS_FIELDS = tuple(
    field.name for field in fields(StructuredOutputsParams)
)
