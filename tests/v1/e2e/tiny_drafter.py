"""Drafters for the tiny model of the engine tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.model_executor.dspark_harness import make_drafter
from tests.model_executor.harness import load
from tests.v1.e2e.budget_policies import InTurn, Watched
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.speculator_training.checkpoint import Verifier, save_speculator
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.transformers_utils.configs.dspark import DSparkConfig, parse_dspark_config

MASK_ID = 256

# By their use: H accepts nearly all, P rolls back all the time, M accepts now so many
# and now so many.
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
    "H": {"method": "draft_model", "num_speculative_tokens": 3},
    "H probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    },
    "M": {"method": "draft_model", "num_speculative_tokens": 5},
    "M probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    },
    "P": {"method": "draft_model", "num_speculative_tokens": 7},
    "P probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    },
    "P, short context": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "max_model_len": 40,
    },
    "dspark": {"method": "dspark"},
    "dspark probabilistic": {
        "method": "dspark",
        "draft_sample_method": "probabilistic",
    },
    "dspark rnn, reduced": {
        "method": "dspark",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    },
    "dspark, short context": {"method": "dspark", "max_model_len": 40},
    "dspark of special tokens": {"method": "dspark"},
    "dflash": {"method": "dflash"},
}
# Of these drafts a step verifies none, some or all.
ADAPTIVE = {
    f"{name} adaptive": DRAFTERS[name] | {"enable_adaptive_verification": True}
    for name in ("ngram", "H probabilistic", "dspark probabilistic")
}
# One of each kind.
KINDS = (
    "ngram",
    "H",
    "M",
    "P probabilistic",
    "dspark probabilistic",
    "dflash",
    "ngram adaptive",
    "dspark probabilistic adaptive",
)
# What differs from a target, and from a drafter of four tokens with a vanilla head.
_MODELS: dict[str, dict[str, Any]] = {
    "M": {"blur": 0.05},
    "M probabilistic": {"blur": 0.05},
    "P": {"seed": 1},
    "P probabilistic": {"seed": 1},
    "P, short context": {"seed": 1},
}
_BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark rnn, reduced": {
        "markov_head_type": "rnn",
        "draft_ids": range(20, 200, 2),
        "sample_from_anchor": False,
        "block_size": 6,
    },
    # The end of a sequence, and ids that no text holds.
    "dspark of special tokens": {"draft_ids": range(259, 268)},
    "dflash": {
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
}


def make_speculative_config(
    drafter: str, model: Path, folder: Path, alphabet: str = "", **keys: Any
) -> dict[str, Any]:
    """Write a drafter of the table; return the configuration that names it.

    Args:
        folder: for its checkpoint, if it has one of its own.
        alphabet: of the target.
        keys: other values than the table's.
    """
    config = (DRAFTERS | ADAPTIVE)[drafter] | keys
    if config["method"] == "draft_model":
        config["model"] = str(model)
        if drafter in _MODELS:
            config["model"] = str(
                save_tiny_model(folder, alphabet=alphabet, **_MODELS[drafter])
            )
    elif config["method"] != "ngram":
        changes = _BLOCK_DRAFTERS.get(drafter, {})
        config["model"] = str(save_tiny_drafter(folder, model, **changes))
    return config


def make_drafting_engine(
    drafter: str,
    model: Path,
    folder: Path,
    alphabet: str = "",
    keys: dict[str, Any] | None = None,
    **kwargs: Any,
) -> TinyEngine:
    """Return an engine that drafts; see make_speculative_config for its arguments.

    An adaptive one verifies in turn none, some and all of a step's drafts.
    """
    config = make_speculative_config(drafter, model, folder, alphabet, **(keys or {}))
    if drafter in ADAPTIVE:
        kwargs.setdefault("budget_policy", Watched(InTurn()))
    return TinyEngine(model, speculative_config=config, **kwargs)


def check_regimes(engine: TinyEngine) -> None:
    """Check that an adaptive engine's steps were in every regime."""
    if isinstance(engine.budget_policy, Watched):
        assert engine.budget_policy.regimes == {"none", "some", "all"}


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
