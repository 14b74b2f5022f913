"""What of the sampling parameters can only be judged with the model at hand."""

from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.validation import validate_structured_outputs


def validate_sampling_params(params: SamplingParams, vllm_config: VllmConfig) -> None:
    """Refuse what the model cannot do and what contradicts itself.

    Args:
        params: completed: the stop tokens and encoded bad words are filled in.

    Raises:
        VLLMValidationError: names the field.
    """
    vocab_size = vllm_config.model_config.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(name, getattr(params, name) or (), vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    for token_ids in params.bad_words_token_ids or ():
        check_token_ids("bad_words", token_ids, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        _check_num_logprobs(name, getattr(params, name), vllm_config)
    _check_reachable(params, vocab_size)
    if params.structured_outputs is not None:
        validate_structured_outputs(
            params.structured_outputs, vllm_config.structured_outputs_config
        )


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the logits have no column for.

    The bound is the model's, not the tokenizer's: either may be larger.

    Raises:
        VLLMValidationError: names `name` and the first wrong id.
    """
    ids = token_ids if isinstance(token_ids, (list, dict)) else list(token_ids)
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
    raise VLLMValidationError(
        f"{name} holds token id {wrong}, but the model's vocabulary is 0 to "
        f"{vocab_size - 1}",
        parameter=name,
        value=wrong,
    )


def _check_num_logprobs(
    name: str, num_logprobs: int | None, vllm_config: VllmConfig
) -> None:
    if num_logprobs is None:
        return
    model_config = vllm_config.model_config
    vocab_size, limit = model_config.vocab_size, model_config.max_logprobs
    limit = vocab_size if limit == -1 else min(limit, vocab_size)
    wanted = vocab_size if num_logprobs == -1 else num_logprobs
    if wanted > limit:
        raise VLLMValidationError(
            f"{name} asks for {wanted} candidates, but the server gives at most "
            f"{limit}; it can be started with a larger --max-logprobs",
            parameter=name,
            value=num_logprobs,
        )


def _check_reachable(params: SamplingParams, vocab_size: int) -> None:
    """Refuse constraints that leave no token to choose, or no way to end."""
    banned = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
    stop_token_ids = set(params.all_stop_token_ids)
    if params.allowed_token_ids is None:
        if len(banned) >= vocab_size:
            raise _contradiction("bad_words", "bad_words forbids every token")
        return
    allowed = set(params.allowed_token_ids) - banned
    if not allowed:
        raise _contradiction(
            "allowed_token_ids", "bad_words forbids every token of allowed_token_ids"
        )
    if params.min_tokens > 0 and allowed <= stop_token_ids:
        raise _contradiction(
            "min_tokens",
            "min_tokens forbids stop tokens, and allowed_token_ids has no other",
        )
    wanted = set(params.stop_token_ids or ())
    if wanted and not wanted & allowed and not params.stop and not params.max_tokens:
        raise _contradiction(
            "stop_token_ids",
            "no stop_token_ids are among allowed_token_ids, so the output cannot end; "
            "allow one of them or set max_tokens",
        )


def _contradiction(parameter: str, message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter=parameter)
