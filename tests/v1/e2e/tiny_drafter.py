"""Drafters of blocks for the tiny model of the engine tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.model_executor.dspark_harness import make_drafter
from tests.model_executor.harness import load
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.speculator_training.checkpoint import Verifier, save_speculator
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.transformers_utils.configs.dspark import DSparkConfig, parse_dspark_config

MASK_ID = 256


def load_tiny_target(model: Path) -> DenseCausalLM:
    target = load(str(model))
    assert isinstance(target, DenseCausalLM)
    return target


def make_tiny_config(model: Path, **changes: Any) -> DSparkConfig:
    """Return a drafter's numbers; by default with every head, in one layer."""
    raw = json.loads((model / "config.json").read_text())
    raw |= {
        "architectures": ["LlamaDSparkModel"],
        "num_hidden_layers": 1,
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [-1, 0],
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 8,
    }
    return parse_dspark_config(raw | changes, "config.json")


def save_tiny_drafter(
    folder: Path, model: Path, draft_ids: range | None = None, **changes: Any
) -> Path:
    """Write a random drafter.

    Args:
        draft_ids: the only ids that it can draft; None for all.
    """
    config, ids = make_tiny_config(model, **changes), None
    if draft_ids is not None:
        ids = torch.tensor(draft_ids)
        config = replace(config, draft_vocab_size=len(ids))
    return save_drafter(folder, make_drafter(config, load_tiny_target(model), ids), ids)


def save_drafter(
    folder: Path, drafter: DSparkTrainingModel, ids: torch.Tensor | None = None
) -> Path:
    save_speculator(str(folder), drafter, Verifier("tiny", "LlamaForCausalLM"), ids)
    return folder
