"""A prompt and its parameters, checked against the model, as a message to the core."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.params_validation import (
    check_token_ids,
    validate_sampling_params,
)
from vllm.v1.engine.text_length import check_text_length

Prompt = str | dict[str, Any] | list[int]

_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
_MAX_PRIORITY = 2**31 - 1


class InputProcessor:
    """Everything about a request that needs the model or the tokenizer to be known."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Tokenizer) -> None:
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self._model_config = vllm_config.model_config
        self._eos_token_ids = find_eos_token_ids(vllm_config, tokenizer)

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[str | None, EngineCoreRequest]:
        """Check a request and make the message for the engine core.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            params: not changed; the message has its own copy.
            arrival_time: seconds of `time.time()`; now if None.
            priority: lower runs earlier; only under the priority policy.
            add_special_tokens: let the tokenizer add what a prompt begins with.

        Returns:
            The prompt's text if it was given, and the message, whose n is that of
            `params`.

        Raises:
            VLLMValidationError: the request cannot be served; names the field.
        """
        if not isinstance(request_id, str) or not request_id:
            raise VLLMValidationError(
                "request_id must be a non-empty string", parameter="request_id"
            )
        text, token_ids, prompt_salt = self._read_prompt(
            prompt, add_special_tokens, params.truncate_prompt_tokens is not None
        )
        cache_salt = cache_salt if cache_salt is not None else prompt_salt
        self._check_priority(priority)
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise VLLMValidationError(
                "cache_salt must be a non-empty string", parameter="cache_salt"
            )
        params = self._complete_params(params)
        token_ids = self._fit_prompt(token_ids, params)
        params.max_tokens = self._fit_max_tokens(len(token_ids), params)
        return text, EngineCoreRequest(
            request_id,
            token_ids,
            params,
            time.time() if arrival_time is None else arrival_time,
            priority,
            cache_salt,
        )

    def _read_prompt(
        self, prompt: Prompt, add_special_tokens: bool, truncates: bool
    ) -> tuple[str | None, list[int], str | None]:
        text: Any = None
        token_ids: Any = None
        cache_salt = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            unknown = sorted(map(str, set(prompt) - _PROMPT_KEYS))
            if unknown:
                raise VLLMValidationError(
                    f"a prompt has no field {', '.join(unknown)}; use prompt or "
                    "prompt_token_ids",
                    parameter="prompt",
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt")
        else:
            token_ids = prompt
        if token_ids is None:
            token_ids = self._tokenize(text, add_special_tokens, truncates)
        return text, self._check_prompt_token_ids(token_ids), cache_salt

    def _tokenize(
        self, text: Any, add_special_tokens: bool, truncates: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise VLLMValidationError(
                "a prompt must be text or a list of token ids", parameter="prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise VLLMValidationError(
                "the prompt holds a lone surrogate, which is not text",
                parameter="prompt",
            ) from error
        check_text_length(
            text,
            self.tokenizer,
            self._model_config.max_model_len,
            parameter="prompt",
            need_not_fit=truncates,
        )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_prompt_token_ids(self, token_ids: Any) -> list[int]:
        is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, str)
        # `type` and not `isinstance`: True is no token id.
        if not is_list or any(type(token_id) is not int for token_id in token_ids):
            raise VLLMValidationError(
                "prompt_token_ids must be a list of integers", parameter="prompt"
            )
        if not token_ids:
            raise VLLMValidationError(
                "the prompt is empty; it needs at least one token", parameter="prompt"
            )
        check_token_ids("prompt", token_ids, self._model_config.vocab_size)
        return list(token_ids)

    def _check_priority(self, priority: Any) -> None:
        if type(priority) is not int or abs(priority) > _MAX_PRIORITY:
            raise VLLMValidationError(
                f"priority must be an integer of at most {_MAX_PRIORITY}",
                parameter="priority",
                value=priority,
            )
        policy = self.vllm_config.scheduler_config.policy
        if priority != 0 and policy != "priority":
            raise VLLMValidationError(
                f"priority is {priority}, but the server schedules by {policy}; start "
                "it with --scheduling-policy priority",
                parameter="priority",
                value=priority,
            )

    def _complete_params(self, params: SamplingParams) -> SamplingParams:
        params = msgspec.structs.replace(params)
        stop_token_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= set(self._eos_token_ids)
        params.eos_token_id = self._eos_token_ids[0] if self._eos_token_ids else None
        params.all_stop_token_ids = sorted(stop_token_ids)
        params.bad_words_token_ids = self._encode_bad_words(params.bad_words or [])
        validate_sampling_params(params, self.vllm_config)
        return params

    def _encode_bad_words(self, bad_words: list[str]) -> list[list[int]] | None:
        """Encode each word as it stands at the start of a text and behind a blank."""
        if not bad_words:
            return None
        sequences: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            for text in (word.lstrip() or word, " " + word.lstrip()):
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
                if token_ids:
                    sequences[tuple(token_ids)] = None
        return [list(sequence) for sequence in sequences]

    def _fit_prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        limit = self._model_config.max_model_len
        num_kept = params.truncate_prompt_tokens
        if num_kept is not None:
            if num_kept > limit:
                raise VLLMValidationError(
                    f"truncate_prompt_tokens ({num_kept}) is greater than the context "
                    f"length of the model ({limit} tokens)",
                    parameter="truncate_prompt_tokens",
                    value=num_kept,
                )
            if num_kept == -1:
                num_kept = max(limit - max(params.max_tokens or 0, 1), 1)
            token_ids = token_ids[-num_kept:]
        if len(token_ids) >= limit:
            raise VLLMValidationError(
                f"the prompt has {len(token_ids)} tokens, but the model's context is "
                f"{limit} tokens, prompt and output together; shorten the prompt or "
                "set truncate_prompt_tokens",
                parameter="prompt",
                value=len(token_ids),
            )
        return token_ids

    def _fit_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        limit = self._model_config.max_model_len
        num_free = limit - num_prompt_tokens
        if params.max_tokens is None:
            if params.min_tokens > num_free:
                raise VLLMValidationError(
                    f"min_tokens ({params.min_tokens}) does not fit: the prompt leaves "
                    f"{num_free} of {limit} tokens",
                    parameter="min_tokens",
                    value=params.min_tokens,
                )
            return num_free
        if params.max_tokens > num_free:
            raise VLLMValidationError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is "
                f"{params.max_tokens}, together more than the model's context of "
                f"{limit} tokens; ask for at most {num_free}",
                parameter="max_tokens",
                value=params.max_tokens,
            )
        # The model must run once to score the prompt; the token is dropped again.
        return max(params.max_tokens, 1)


def find_eos_token_ids(vllm_config: VllmConfig, tokenizer: Tokenizer) -> list[int]:
    """Return every token that ends a text, the tokenizer's own first.

    The tokenizer, config.json and generation_config.json often disagree; a model may
    end with any of theirs.
    """
    model_config = vllm_config.model_config
    candidates = [
        tokenizer.eos_token_id,
        *model_config.hf_config.eos_token_ids,
        *model_config.generation_eos_token_ids,
    ]
    unique = dict.fromkeys(token_id for token_id in candidates if token_id is not None)
    return [token_id for token_id in unique if 0 <= token_id < model_config.vocab_size]
