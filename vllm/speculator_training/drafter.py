"""A drafter to train or to judge: a new one for a target, or one from a directory."""

import os
from dataclasses import replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.speculator_training.features import TargetRunner
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.speculator_training.settings import DrafterSettings
from vllm.transformers_utils.config import HfConfig
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    check_fits_target,
    parse_dspark_config,
    to_speculators_json,
)

_NUM_DEFAULT_TAPS = 5


def default_target_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers to tap, by their output: spread, and never the last one."""
    if num_layers < 3:
        return tuple(range(-1, num_layers - 1))
    last = max(num_layers - 3, 1)
    num_taps = min(_NUM_DEFAULT_TAPS, last)
    step = (last - 1) / max(num_taps - 1, 1)
    return tuple(round(1 + step * i) for i in range(num_taps))


def make_drafter_config(
    settings: DrafterSettings, target: HfConfig, mask_token_id: int
) -> DSparkConfig:
    """Return the configuration of a new drafter for a target.

    Raises:
        UnsupportedError: the settings do not fit the target, or each other.
    """
    architecture = target.architecture
    if architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        architecture = "Qwen3ForCausalLM"
    backbone = replace(
        target,
        architecture=architecture,
        num_hidden_layers=settings.num_layers,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
    )
    layer_ids = settings.target_layer_ids
    if layer_ids is None:
        layer_ids = default_target_layers(target.num_hidden_layers)
    config = DSparkConfig(
        backbone=backbone,
        block_size=settings.num_draft_tokens,
        target_layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(
            settings.draft_vocab_size or target.vocab_size, target.vocab_size
        ),
        markov_rank=settings.markov_rank,
        markov_head_type=settings.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        num_target_layers=target.num_hidden_layers,
    )
    # What is written at the end must be readable: better known now.
    raw = to_speculators_json(config, "target", target.architecture)
    parse_dspark_config(raw, "the drafter")
    check_fits_target(config, target)
    return config


def make_drafter(
    config: DSparkConfig,
    runner: TargetRunner,
    draft_token_ids: torch.Tensor | None,
    num_positions: int,
    seed: int,
) -> DSparkTrainingModel:
    """Return a drafter with random weights, on the target's device."""
    model = DSparkTrainingModel(
        config,
        num_positions,
        runner.embedding(),
        runner.head_rows(draft_token_ids),
        seed,
    )
    return model.to(runner.device)


def open_drafter(
    folder: str, config: DSparkConfig, runner: TargetRunner, num_positions: int
) -> tuple[DSparkTrainingModel, torch.Tensor | None]:
    """Return the drafter of a directory, and which of the target's ids it drafts.

    Raises:
        CheckpointError: the weights are missing, damaged or do not fit the model.
        UnsupportedError: its rotation is one that only the engine knows.
    """
    if config.is_rope_interleaved:
        raise UnsupportedError(f"{folder}: interleaved RoPE cannot be evaluated")
    tensors = _read_tensors(folder)
    ids = None
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if offsets is not None:
        ids = offsets + torch.arange(len(offsets))
    elif config.has_reduced_vocab:
        raise CheckpointError(f"{folder}: d2t, its draft vocabulary, is missing")
    model = make_drafter(config, runner, ids, num_positions, seed=0)
    for name, buffer in (
        ("embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
    ):
        own = tensors.pop(name, None)
        if own is not None:
            setattr(model, buffer, own.float().to(runner.device))
    try:
        model.load_state_dict({name: value.float() for name, value in tensors.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: {reason:.300}") from None
    return model, ids


def _read_tensors(folder: str) -> dict[str, torch.Tensor]:
    try:
        names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= load_file(os.path.join(folder, name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if not tensors:
        raise CheckpointError(f"{folder}: there is no .safetensors file")
    return tensors
