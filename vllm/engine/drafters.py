"""Which checkpoint drafts for a target, and what it says of itself."""

import os
from dataclasses import dataclass

from vllm.config import ModelConfig
from vllm.exceptions import CheckpointError, UnsupportedError, VLLMValidationError
from vllm.transformers_utils.config import HfConfig, load_hf_config, read_json
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    check_fits_target,
    is_drafter_json,
    load_dspark_config,
)
from vllm.transformers_utils.model_files import (
    EMBEDDED_MODEL_NAME,
    embedded_drafter_folder,
    find_embedded_drafter,
    is_embedded_model,
    resolve_model_path,
)

# Keys of a target whose checkpoint holds draft layers beside its own.
_INNER_DRAFTER_PREFIX = "dspark_"


@dataclass(frozen=True)
class Drafter:
    """What a drafter's checkpoint says; nothing for a drafter without one.

    Args:
        method: that the checkpoint is for.
        hf_config: of a model that drafts token by token.
        dspark_config: of a drafter of blocks.
    """

    method: str
    path: str | None = None
    hf_config: HfConfig | None = None
    dspark_config: DSparkConfig | None = None

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions that the drafter was made for."""
        if self.dspark_config is not None:
            return self.dspark_config.backbone.max_position_embeddings
        return (
            None if self.hf_config is None else self.hf_config.max_position_embeddings
        )


def find_own_drafter(target: ModelConfig, served_drafter: str | None) -> str | None:
    """Return the drafter that a target has without anybody naming it, or None.

    Args:
        served_drafter: the directory that was named as the model, if it is a drafter's.

    Raises:
        CheckpointError: that of the embedded model is damaged.
    """
    if served_drafter is not None:
        return served_drafter
    return find_embedded_drafter() if is_embedded_model(target.model) else None


def explain_no_drafter(target: ModelConfig) -> str:
    """Say why a target has no drafter of its own."""
    if is_embedded_model(target.model):
        return (
            f"this copy of vllm was made without the drafter of {EMBEDDED_MODEL_NAME}, "
            f"{embedded_drafter_folder()}"
        )
    reason = (
        f"{target.model} has none of its own: it is not the embedded "
        f"{EMBEDDED_MODEL_NAME}, nor a drafter that names its model"
    )
    if os.path.isdir(target.model):
        keys = sorted(read_json(target.model, "config.json"))
        inner = [key for key in keys if key.startswith(_INNER_DRAFTER_PREFIX)]
        if inner:
            reason += f"; draft layers in the model's own files ({inner[0]}) cannot run"
    return reason


def open_named_drafter(model: str, method: str | None, target: ModelConfig) -> Drafter:
    """Look at the drafter that a user has named.

    Args:
        model: a path or a hub name.
        method: None for the checkpoint's own.

    Raises:
        VLLMValidationError: there is none, or it does not fit the target.
    """
    try:
        return open_drafter(resolve_model_path(model), method, target)
    except UnsupportedError as error:
        parameter = "speculative_config.model"
        raise VLLMValidationError(
            f"{parameter} {model} for the model {target.model}: {error}",
            parameter=parameter,
            value=model,
        ) from None


def open_drafter(path: str, method: str | None, target: ModelConfig) -> Drafter:
    """Look at a drafter's checkpoint.

    Args:
        method: None for the checkpoint's own.

    Raises:
        CheckpointError: it is damaged.
        UnsupportedError: it is of another method, or does not fit the target.
    """
    method = method or _detect_method(path)
    if method == "draft_model":
        hf_config = load_hf_config(path)
        _check_vocabularies(hf_config, target.hf_config)
        drafter = Drafter(method, path, hf_config)
    else:
        config = load_dspark_config(path)
        has_heads = config.markov_rank > 0 or config.enable_confidence_head
        if method == "dflash" and has_heads:
            raise UnsupportedError(
                f"{path} has a Markov or confidence head: its method is dspark, not "
                "dflash"
            )
        check_fits_target(config, target.hf_config)
        drafter = Drafter(method, path, None, config)
    _check_has_weights(path)
    return drafter


def _detect_method(path: str) -> str:
    """Return the method of a checkpoint: a model of its own unless it says else."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        return "draft_model"
    is_drafter = is_drafter_json(read_json(path, "config.json"))
    return "dspark" if is_drafter else "draft_model"


def _check_has_weights(path: str) -> None:
    # Found out here, it costs no start of the engine.
    if os.path.isdir(path) and not any(
        name.endswith(".safetensors") for name in os.listdir(path)
    ):
        raise CheckpointError(f"{path}: there is no model.safetensors")


def _check_vocabularies(draft: HfConfig, target: HfConfig) -> None:
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the "
            f"target of {target.vocab_size}: they must share one vocabulary"
        )
