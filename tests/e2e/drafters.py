"""Drafters for the embedded model: itself, n-grams, and random nets of each kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.v1.e2e.tiny_engine import save_tiny_model
from vllm.speculator_training.checkpoint import Verifier, save_speculator
from vllm.speculator_training.drafter import make_drafter_config
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.speculator_training.settings import DrafterSettings
from vllm.transformers_utils.config import load_hf_config
from vllm.transformers_utils.model_files import resolve_model_path

NO_DRAFTER = "none"
# What a server uses that is told nothing.
ITS_OWN = "its own"
# H accepts nearly all; P and the random nets nearly nothing.
RANDOM_DRAFTERS = ("P", "dspark", "dflash")
_CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    },
    "H": {"method": "draft_model", "num_speculative_tokens": 3},
    "P": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
    "dspark": {
        "method": "dspark",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    },
    "dflash": {"method": "dflash", "num_speculative_tokens": 2},
}
# Of these drafts, steps verify as many as pay: at first by this table, in which a
# token costs next to nothing among few, and nearly all among many.
ADAPTIVE = "dspark adaptive"
_CONFIGS[ADAPTIVE] = _CONFIGS["dspark"] | {"enable_adaptive_verification": True}
_COSTS = {
    "draft_curve": [[1, 1], [64, 10]],
    "verify_curve": [[1, 20], [8, 21], [64, 150], [512, 1300]],
}
DRAFTERS = (ITS_OWN, *_CONFIGS)
_BLOCK_SIZE = 3
_DRAFT_IDS = torch.arange(20, 2068)
_MASK_TOKEN_ID = 5


def make_speculative_config(drafter: str, folders: dict[str, Path]) -> dict[str, Any]:
    """Return the configuration of a drafter; H is the embedded model itself."""
    config = dict(_CONFIGS[drafter])
    if drafter == ADAPTIVE:
        config["cost_table"] = str(folders["costs"])
    if drafter == "H":
        config["model"] = resolve_model_path(None)
    elif config["method"] in folders:
        config["model"] = str(folders[config["method"]])
    elif drafter in folders:
        config["model"] = str(folders[drafter])
    return config


def save_drafters(folder: Path) -> dict[str, Path]:
    """Write the random drafters; return their folders, and the table of costs."""
    folders = {name: folder / name for name in (*RANDOM_DRAFTERS, "costs")}
    folders["costs"].write_text(json.dumps(_COSTS))
    folders["P"].mkdir()
    # Its context is shorter than the target's, and after one token it says NaN.
    vocab_size = load_hf_config(resolve_model_path(None)).vocab_size
    save_tiny_model(folders["P"], vocab_size=vocab_size)
    _save_blocks(folders["dspark"])
    _save_blocks(
        folders["dflash"],
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    return folders


def _save_blocks(folder: Path, **changes: Any) -> None:
    target = load_hf_config(resolve_model_path(None))
    settings = DrafterSettings(
        num_draft_tokens=_BLOCK_SIZE,
        target_layer_ids=(1, 20),
        draft_vocab_size=len(_DRAFT_IDS),
        intermediate_size=64,
        markov_rank=8,
    )
    config = make_drafter_config(settings, target, _MASK_TOKEN_ID)
    net = DSparkTrainingModel(
        replace(config, **changes),
        target.max_position_embeddings,
        # Not written: they are the target's.
        torch.empty(target.vocab_size, target.hidden_size),
        torch.empty(len(_DRAFT_IDS), target.hidden_size),
    )
    verifier = Verifier("embedded", target.architecture)
    save_speculator(str(folder), net, verifier, _DRAFT_IDS)
