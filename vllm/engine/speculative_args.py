"""From the value of --speculative-config to a SpeculativeConfig."""

from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.config import ModelConfig, SpeculativeConfig
from vllm.config.cost_profile import CostProfile, read_cost_profile
from vllm.config.speculative import (
    BLOCK_METHODS,
    DRAFT_SAMPLE_METHODS,
    REJECTION_SAMPLE_METHODS,
    SPECULATIVE_METHODS,
)
from vllm.engine.checks import check_choice, check_minimum, invalid
from vllm.engine.drafters import (
    Drafter,
    explain_no_drafter,
    find_own_drafter,
    open_drafter,
    open_named_drafter,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.transformers_utils.configs.dspark import DSparkConfig
from vllm.transformers_utils.model_files import is_embedded_model
from vllm.utils.suggestions import did_you_mean

logger = init_logger(__name__)

# The drafter that comes with the model, if one does.
AUTO = "auto"

_FLAG = "speculative_config"
_PREFIX = f"{_FLAG}."
_MAX_SPECULATIVE_TOKENS = 64
_KEYS_OF_NGRAM = ("prompt_lookup_min", "prompt_lookup_max")
_KEYS_OF_MODELS = ("model", "draft_sample_method", "max_model_len")
# The target can have a drafter of its own for it.
_OWN_METHODS = ("dspark", None)


@dataclass(frozen=True)
class _Keys:
    """What a user can write; None is left open."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    max_model_len: int | None = None
    enable_adaptive_verification: bool | None = None
    cost_table: str | None = None


def check_speculative_config(values: dict[str, Any] | str | None) -> None:
    """Check what can be checked without the models.

    Args:
        values: keys and values; AUTO for the default; None for no speculation.

    Raises:
        VLLMValidationError: a key is unknown, missing or out of its bounds.
    """
    if isinstance(values, str) and values != AUTO:
        raise invalid(_FLAG, f"must be {AUTO}, null or a mapping of keys", values)
    if values is None or isinstance(values, str):
        return
    known = [field.name for field in fields(_Keys)]
    for key in values:
        if key not in known:
            raise VLLMValidationError(
                f"unknown key {_PREFIX}{key}{did_you_mean(str(key), known)}",
                parameter=f"{_PREFIX}{key}",
            )
    keys = _Keys(**values)
    # A method that is left open is the checkpoint's own; a mapping without anything in
    # it is a mistake.
    if keys.method is not None or not values:
        check_choice(_PREFIX + "method", keys.method, SPECULATIVE_METHODS)
    if keys.draft_sample_method is not None:
        check_choice(
            _PREFIX + "draft_sample_method",
            keys.draft_sample_method,
            DRAFT_SAMPLE_METHODS,
        )
    check_choice(
        _PREFIX + "rejection_sample_method",
        keys.rejection_sample_method,
        REJECTION_SAMPLE_METHODS,
    )
    if not isinstance(keys.enable_adaptive_verification, bool | None):
        raise invalid(
            _PREFIX + "enable_adaptive_verification",
            "must be true or false",
            keys.enable_adaptive_verification,
        )
    if keys.cost_table is not None:
        _check_name(_PREFIX + "cost_table", keys.cost_table, "a file")
    _check_integers(keys)
    _check_lookup(keys)
    if keys.num_speculative_tokens is not None:
        _resolve_rates(keys)
    _check_unread(keys)
    _check_model(keys)


def resolve_speculative_config(
    values: dict[str, Any] | str | None,
    target: ModelConfig,
    served_drafter: str | None = None,
) -> SpeculativeConfig | None:
    """Look at the drafter and decide what was left open.

    Args:
        values: as in `check_speculative_config`.
        served_drafter: the directory that was named as the model, if it is a drafter's.

    Returns:
        None: no speculation.

    Raises:
        VLLMValidationError: a key is wrong, or the drafter that it names.
        CheckpointError: the target's own drafter is damaged.
        UnsupportedError: it does not fit the target.
    """
    check_speculative_config(values)
    if values is None:
        return None
    if isinstance(values, str):
        keys = _Keys()
        drafter = _find_default(target, served_drafter)
        if drafter is None:
            return None
    else:
        keys = _Keys(**values)
        drafter = _find_drafter(keys, target, served_drafter)
    # A draw is accepted more often than the best guess, where the text is drawn too; a
    # checkpoint that is named drafts as upstream.
    is_own = keys.model is None and drafter.path is not None
    usual = "probabilistic" if is_own else "greedy"
    is_adaptive = keys.enable_adaptive_verification
    if is_adaptive is None:
        is_adaptive = is_own and is_embedded_model(target.model)
    keys = replace(
        keys,
        method=drafter.method,
        num_speculative_tokens=_choose_num_drafts(keys, drafter),
        draft_sample_method=keys.draft_sample_method or usual,
        enable_adaptive_verification=is_adaptive,
    )
    return _make_config(keys, drafter, target)


def describe_speculation(config: SpeculativeConfig) -> str:
    """Say in one line who drafts, and how to do without."""
    drafter = f" from {config.model}" if config.model else ""
    return (
        f"Speculative decoding: {config.method} drafts up to "
        f"{config.num_speculative_tokens} tokens a step{drafter}; "
        "--speculative-config null turns it off"
    )


def _find_default(target: ModelConfig, served_drafter: str | None) -> Drafter | None:
    path = find_own_drafter(target, served_drafter)
    if path is None:
        if is_embedded_model(target.model):
            logger.warning("No speculative decoding: %s", explain_no_drafter(target))
        return None
    drafter = open_drafter(path, None, target)
    config = drafter.dspark_config
    if config is not None:
        config = config.shortened(_default_num_drafts(config))
    if config is not None and config.block_size > target.max_model_len:
        logger.warning(
            "No speculative decoding: the drafter's blocks have %d tokens, more than "
            "max_model_len %d",
            config.block_size,
            target.max_model_len,
        )
        return None
    return drafter


def _find_drafter(
    keys: _Keys, target: ModelConfig, served_drafter: str | None
) -> Drafter:
    if keys.method == "ngram":
        return Drafter("ngram")
    if keys.model is not None:
        return open_named_drafter(keys.model, keys.method, target)
    path = find_own_drafter(target, served_drafter)
    if path is None:
        remedy = "" if keys.method else ", or set method to ngram"
        raise VLLMValidationError(
            f"{_PREFIX}model must name the drafter{remedy}: "
            f"{explain_no_drafter(target)}",
            parameter=_PREFIX + "model",
        )
    return open_drafter(path, keys.method, target)


def _choose_num_drafts(keys: _Keys, drafter: Drafter) -> int:
    num_drafts, config = keys.num_speculative_tokens, drafter.dspark_config
    if config is not None:
        most = config.num_draft_tokens
        if num_drafts is not None and num_drafts > most:
            raise invalid(
                _PREFIX + "num_speculative_tokens",
                f"must be at most {most}, what a block of {drafter.path} gives",
                num_drafts,
            )
        num_drafts = num_drafts or _default_num_drafts(config)
    _check_num_drafts(num_drafts)
    assert num_drafts is not None, "checked above"
    return num_drafts


def _default_num_drafts(config: DSparkConfig) -> int:
    return config.num_proposed_tokens or config.num_draft_tokens


def _make_config(
    keys: _Keys, drafter: Drafter, target: ModelConfig
) -> SpeculativeConfig:
    assert keys.method is not None, "the drafter's"
    assert keys.num_speculative_tokens is not None, "the drafter's, if left open"
    assert keys.draft_sample_method is not None, "chosen if left open"
    assert keys.enable_adaptive_verification is not None, "chosen if left open"
    asked, own = keys.max_model_len, drafter.max_position_embeddings
    max_model_len = min(filter(None, (target.max_model_len, asked, own)))
    dspark_config = drafter.dspark_config
    if dspark_config is not None:
        dspark_config = dspark_config.shortened(keys.num_speculative_tokens)
    _check_block_fits(dspark_config, max_model_len)
    lookup_min, lookup_max = _lookup(keys)
    return SpeculativeConfig(
        method=keys.method,
        num_speculative_tokens=keys.num_speculative_tokens,
        model=drafter.path,
        draft_hf_config=drafter.hf_config,
        dspark_config=dspark_config,
        max_model_len=max_model_len,
        draft_sample_method=keys.draft_sample_method,
        rejection_sample_method=keys.rejection_sample_method,
        synthetic_acceptance_rates=_resolve_rates(keys),
        prompt_lookup_min=lookup_min,
        prompt_lookup_max=lookup_max,
        enable_adaptive_verification=keys.enable_adaptive_verification,
        cost_profile=_read_cost_table(keys),
    )


def _check_model(keys: _Keys) -> None:
    if keys.model is None and keys.method in ("ngram", *_OWN_METHODS):
        return
    _check_name(_PREFIX + "model", keys.model, "the drafter")


def _check_name(parameter: str, value: object, what: str) -> None:
    # No name of a file has a NUL; to open one is no OSError.
    if not (isinstance(value, str) and value and "\0" not in value):
        raise invalid(parameter, f"must name {what}", value)


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
    takes_default = keys.method in (*BLOCK_METHODS, None)
    if keys.num_speculative_tokens is not None or not takes_default:
        _check_num_drafts(keys.num_speculative_tokens)


def _check_num_drafts(num_drafts: int | None) -> None:
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


def _read_cost_table(keys: _Keys) -> CostProfile | None:
    if keys.cost_table is None:
        return None
    parameter = _PREFIX + "cost_table"
    if not keys.enable_adaptive_verification:
        raise invalid(
            parameter, "needs enable_adaptive_verification to be true", keys.cost_table
        )
    return read_cost_profile(keys.cost_table, parameter)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_block_fits(config: DSparkConfig | None, max_model_len: int) -> None:
    if config is not None and config.block_size > max_model_len:
        raise VLLMValidationError(
            f"the drafter's blocks have {config.block_size} tokens, more than the "
            f"{max_model_len} positions up to which it drafts: raise max_model_len",
            parameter="max_model_len",
        )
