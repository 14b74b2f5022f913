"""From the keys of --speculative-config to a SpeculativeConfig."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.config import ModelConfig, SpeculativeConfig
from vllm.config.speculative import (
    BLOCK_METHODS,
    DRAFT_SAMPLE_METHODS,
    REJECTION_SAMPLE_METHODS,
    SPECULATIVE_METHODS,
)
from vllm.engine.checks import check_choice, check_minimum, invalid
from vllm.exceptions import UnsupportedError, VLLMValidationError
from vllm.transformers_utils.config import HfConfig, load_hf_config, read_json
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    check_fits_target,
    is_drafter_json,
    load_dspark_config,
)
from vllm.transformers_utils.model_files import resolve_model_path
from vllm.utils.suggestions import did_you_mean

_PREFIX = "speculative_config."
_MAX_SPECULATIVE_TOKENS = 64
_KEYS_OF_NGRAM = ("prompt_lookup_min", "prompt_lookup_max")
_KEYS_OF_MODELS = ("model", "draft_sample_method", "max_model_len")


@dataclass(frozen=True)
class _Keys:
    """What a user can write."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True)
class _Drafter:
    """What a drafter's checkpoint says; nothing for a drafter without one."""

    path: str | None = None
    hf_config: HfConfig | None = None
    dspark_config: DSparkConfig | None = None
    max_position_embeddings: int | None = None


def check_speculative_keys(values: dict[str, Any] | None) -> None:
    """Check what can be checked without the models; None: no speculation.

    Raises:
        VLLMValidationError: a key is unknown, missing or out of its bounds.
    """
    if values is None:
        return
    known = [field.name for field in fields(_Keys)]
    for key in values:
        if key not in known:
            raise VLLMValidationError(
                f"unknown key {_PREFIX}{key}{did_you_mean(key, known)}",
                parameter=_PREFIX + key,
            )
    keys = _Keys(**values)
    # A method that is left open is the checkpoint's own.
    if keys.method is not None or keys.model is None:
        check_choice(_PREFIX + "method", keys.method, SPECULATIVE_METHODS)
    check_choice(
        _PREFIX + "draft_sample_method", keys.draft_sample_method, DRAFT_SAMPLE_METHODS
    )
    check_choice(
        _PREFIX + "rejection_sample_method",
        keys.rejection_sample_method,
        REJECTION_SAMPLE_METHODS,
    )
    _check_integers(keys)
    _check_lookup(keys)
    if keys.num_speculative_tokens is not None:
        _resolve_rates(keys)
    _check_unread(keys)
    if keys.method != "ngram" and not (isinstance(keys.model, str) and keys.model):
        raise invalid(_PREFIX + "model", "must name the drafter", keys.model)


def resolve_speculative_config(
    values: dict[str, Any] | None, target: ModelConfig
) -> SpeculativeConfig | None:
    """Look at the drafter and decide what was left open; None: no speculation.

    Raises:
        VLLMValidationError: a key is wrong.
        CheckpointError: the drafter is not there or damaged.
        UnsupportedError: it does not fit the target.
    """
    if values is None:
        return None
    check_speculative_keys(values)
    keys = _Keys(**values)
    keys, drafter = _look_at_drafter(keys, target.hf_config)
    _check_num_drafts(keys)
    assert keys.method is not None, "the checkpoint's, if the user left it open"
    assert keys.num_speculative_tokens is not None, "checked above"
    asked, own = keys.max_model_len, drafter.max_position_embeddings
    max_model_len = min(filter(None, (target.max_model_len, asked, own)))
    _check_block_fits(drafter.dspark_config, max_model_len)
    lookup_min, lookup_max = _lookup(keys)
    return SpeculativeConfig(
        method=keys.method,
        num_speculative_tokens=keys.num_speculative_tokens,
        model=drafter.path,
        draft_hf_config=drafter.hf_config,
        dspark_config=drafter.dspark_config,
        max_model_len=max_model_len,
        draft_sample_method=keys.draft_sample_method,
        rejection_sample_method=keys.rejection_sample_method,
        synthetic_acceptance_rates=_resolve_rates(keys),
        prompt_lookup_min=lookup_min,
        prompt_lookup_max=lookup_max,
    )


def _look_at_drafter(keys: _Keys, target: HfConfig) -> tuple[_Keys, _Drafter]:
    """Read the drafter's configuration; return the keys with what it decides."""
    if keys.method == "ngram":
        return keys, _Drafter()
    path = resolve_model_path(keys.model)
    method = keys.method or _detect_method(path)
    if method == "draft_model":
        hf_config = load_hf_config(path)
        _check_vocabularies(hf_config, target)
        drafter = _Drafter(
            path, hf_config, max_position_embeddings=hf_config.max_position_embeddings
        )
        return replace(keys, method=method), drafter
    config = load_dspark_config(path)
    has_heads = config.markov_rank > 0 or config.enable_confidence_head
    if method == "dflash" and has_heads:
        raise UnsupportedError(
            f"{path} has a Markov or confidence head: its method is dspark, not dflash"
        )
    num_drafts = keys.num_speculative_tokens or config.num_draft_tokens
    check_fits_target(config, target, num_drafts)
    keys = replace(keys, method=method, num_speculative_tokens=num_drafts)
    max_positions = config.backbone.max_position_embeddings
    return keys, _Drafter(path, None, config, max_positions)


def _detect_method(path: str) -> str:
    """Return the method of a checkpoint: a model of its own unless it says else."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        return "draft_model"
    is_drafter = is_drafter_json(read_json(path, "config.json"))
    return "dspark" if is_drafter else "draft_model"


def _check_integers(keys: _Keys) -> None:
    for name in (
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "max_model_len",
    ):
        value = getattr(keys, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int)
        ):
            raise invalid(_PREFIX + name, "must be an integer", value)
        check_minimum(_PREFIX + name, value, 1)
    takes_default = keys.method in (*BLOCK_METHODS, None) and keys.model is not None
    if keys.num_speculative_tokens is not None or not takes_default:
        _check_num_drafts(keys)


def _check_num_drafts(keys: _Keys) -> None:
    num_drafts = keys.num_speculative_tokens
    if num_drafts is None or num_drafts > _MAX_SPECULATIVE_TOKENS:
        raise invalid(
            _PREFIX + "num_speculative_tokens",
            f"must be from 1 to {_MAX_SPECULATIVE_TOKENS}",
            num_drafts,
        )


def _lookup(keys: _Keys) -> tuple[int, int]:
    """Return the shortest and the longest suffix; one alone sets both, else 5 and 5."""
    longest = keys.prompt_lookup_max or keys.prompt_lookup_min or 5
    return keys.prompt_lookup_min or longest, longest


def _check_lookup(keys: _Keys) -> None:
    shortest, longest = _lookup(keys)
    if shortest > longest:
        raise invalid(
            _PREFIX + "prompt_lookup_min",
            f"must be at most prompt_lookup_max ({longest})",
            shortest,
        )


def _check_unread(keys: _Keys) -> None:
    """Refuse what the method would leave aside."""
    is_ngram = keys.method == "ngram"
    unread = _KEYS_OF_MODELS if is_ngram else _KEYS_OF_NGRAM
    for key in fields(_Keys):
        value = getattr(keys, key.name)
        if key.name in unread and value != key.default:
            drafters = "a drafter with a model" if is_ngram else "ngram"
            raise invalid(_PREFIX + key.name, f"is for {drafters} only", value)


def _resolve_rates(keys: _Keys) -> tuple[float, ...]:
    rates, length = keys.synthetic_acceptance_rates, keys.synthetic_acceptance_length
    num_drafts = keys.num_speculative_tokens or 0
    is_synthetic = keys.rejection_sample_method == "synthetic"
    if not is_synthetic:
        if rates is not None or length is not None:
            raise invalid(
                _PREFIX + "rejection_sample_method",
                "must be synthetic for acceptance rates or a length",
                keys.rejection_sample_method,
            )
        return ()
    if (rates is None) == (length is None):
        raise invalid(
            _PREFIX + "synthetic_acceptance_rates",
            "or synthetic_acceptance_length must be given, and not both",
            rates,
        )
    if length is not None:
        if not _is_number(length) or not 1 <= length <= num_drafts + 1:
            raise invalid(
                _PREFIX + "synthetic_acceptance_length",
                f"must be a number from 1 to {num_drafts + 1}",
                length,
            )
        # As many certain acceptances as fit, then the fraction, then none.
        return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(num_drafts))
    listed = rates if isinstance(rates, list) else []
    numbers = [rate for rate in listed if _is_number(rate) and 0 <= rate <= 1]
    if len(numbers) != num_drafts or numbers != sorted(numbers, reverse=True):
        raise invalid(
            _PREFIX + "synthetic_acceptance_rates",
            f"must be {num_drafts} non-increasing numbers in [0, 1]",
            rates,
        )
    return tuple(float(rate) for rate in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_block_fits(config: DSparkConfig | None, max_model_len: int) -> None:
    if config is not None and config.block_size > max_model_len:
        raise UnsupportedError(
            f"the drafter's blocks have {config.block_size} tokens, more than the "
            f"{max_model_len} positions up to which it drafts: raise max_model_len"
        )


def _check_vocabularies(draft: HfConfig, target: HfConfig) -> None:
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the "
            f"target of {target.vocab_size}: they must share one vocabulary"
        )
