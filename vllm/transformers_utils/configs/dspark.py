"""The numbers of a DSpark drafter, from either of the two formats in use.

DeepSpec's config.json is the target's with keys added; that of speculators holds the
draft layers in a part of its own. Both mean the same net, in other conventions.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.transformers_utils.config import (
    HfConfig,
    JsonFields,
    parse_hf_config,
    read_json,
)

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

# Draft layers are built like those of these models.
_DEEPSPEC_BACKBONES = {
    "Qwen3DSparkModel": "Qwen3ForCausalLM",
    "LlamaDSparkModel": "LlamaForCausalLM",
}
_SPECULATORS_BACKBONES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_SPECULATORS_TYPE = "dspark"
# Pairs of neighbouring dimensions are rotated, where others rotate halves.
_INTERLEAVED_KEYS = ("rope_interleave", "rope_interleaved")


@dataclass(frozen=True)
class DSparkConfig:
    """One drafter, checked and complete.

    Args:
        backbone: of the draft layers; its vocabulary is the target's.
        block_size: tokens that one draft pass reads, the anchor and mask tokens.
        target_layer_ids: tapped layers: i is the output of layer i, -1 the embeddings.
        mask_token_id: what a block holds after its anchor.
        target_hidden_size: width of one tap.
        draft_vocab_size: tokens that can be drafted.
        markov_rank: of the bias by the previous token; 0 for no such head.
        sample_from_anchor: slot j of a block predicts the token after its own
            position; False: the token at it, so that the anchor's slot predicts none.
        num_target_layers: of the target it was trained for; None if not said.
        is_rope_interleaved: q and k are stored for rotation of neighbouring pairs.
        confidence_temperatures: divide the confidence logits, one a draft; empty if
            never calibrated.
        num_proposed_tokens: drafts to take of a block if nobody says otherwise, fewer
            than it gives; None: all.
        allows_short_blocks: the states of a block's first slots are as good without
            the slots behind them. A drafter is run at the size it was trained at unless
            its file says so.
    """

    backbone: HfConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    target_hidden_size: int
    draft_vocab_size: int
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    sample_from_anchor: bool = True
    num_target_layers: int | None = None
    is_rope_interleaved: bool = False
    confidence_temperatures: tuple[float, ...] = ()
    num_proposed_tokens: int | None = None
    allows_short_blocks: bool = False

    @property
    def num_draft_layers(self) -> int:
        """Layers of the drafter."""
        return self.backbone.num_hidden_layers

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_lookahead_slots(self) -> int:
        """Cache slots after the context that a draft pass writes for its block."""
        return self.block_size

    @property
    def aux_hidden_state_layer_ids(self) -> tuple[int, ...]:
        """The tapped layers as `SupportsTaps` counts: i is the input of layer i."""
        return tuple(layer_idx + 1 for layer_idx in self.target_layer_ids)

    @property
    def num_silent_slots(self) -> int:
        """Slots in front of a block that nothing is drafted from."""
        return self.block_size - self.num_draft_tokens

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether some of the target's tokens can never be drafted."""
        return self.draft_vocab_size != self.backbone.vocab_size

    def shortened(self, num_drafts: int) -> "DSparkConfig":
        """Return the drafter with the smallest block that gives so many drafts.

        Args:
            num_drafts: at least 1, at most `num_draft_tokens`.
        """
        if not self.allows_short_blocks:
            return self
        return replace(
            self,
            block_size=self.num_silent_slots + num_drafts,
            confidence_temperatures=self.confidence_temperatures[:num_drafts],
        )


def is_drafter_json(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of a drafter that reads a target's states.

    Args:
        raw: the parsed file.
    """
    architectures = raw.get("architectures")
    architecture = str(architectures[:1]) if isinstance(architectures, list) else ""
    is_block_drafter = "DSpark" in architecture or "DFlash" in architecture
    return is_block_drafter or "speculators_model_type" in raw


def load_dspark_config(path: str) -> DSparkConfig:
    """Read the config.json of a drafter's directory.

    Raises:
        CheckpointError: the file is missing or damaged, or one of its numbers is.
        UnsupportedError: it describes another kind of drafter.
    """
    return parse_dspark_config(read_json(path, "config.json"), f"{path}/config.json")


def parse_dspark_config(raw: dict[str, Any], where: str) -> DSparkConfig:
    """Check the contents of a drafter's config.json and complete them.

    Args:
        raw: the parsed file, in either format.
        where: names the file in errors.

    Raises:
        CheckpointError: a number is missing or wrong.
        UnsupportedError: it describes another kind of drafter.
    """
    is_speculators = "speculators_model_type" in raw
    parse = _parse_speculators if is_speculators else _parse_deepspec
    config = parse(raw, where)
    _check_complete(config, where)
    return config


def find_verifier(path: str) -> str | None:
    """Return the name of the model that a drafter's directory says it drafts for.

    Args:
        path: a directory or a file.

    Returns:
        None if no drafter is there.

    Raises:
        CheckpointError: the config.json of the directory is damaged.
        UnsupportedError: it is a drafter's, and does not name the model.
    """
    if not os.path.isfile(os.path.join(path, "config.json")):
        return None
    raw = read_json(path, "config.json")
    if not is_drafter_json(raw):
        return None
    settings = raw.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        raise UnsupportedError(
            f"{path} is a drafter and does not say for which model: serve that model, "
            "and name this directory as speculative_config.model"
        )
    return name


def check_fits_target(config: DSparkConfig, target: HfConfig) -> None:
    """Check that a drafter can draft for a target.

    Raises:
        UnsupportedError: something does not fit; the message has both values.
    """
    backbone = config.backbone
    num_layers = target.num_hidden_layers
    last_tap = max(config.target_layer_ids)
    trained_layers = config.num_target_layers or num_layers
    # Each: what it is, the drafter's value, the target's, and whether they fit.
    checks = (
        (
            "vocabulary (tokens, padding included)",
            backbone.vocab_size,
            target.vocab_size,
            backbone.vocab_size == target.vocab_size,
        ),
        (
            "hidden size",
            config.target_hidden_size,
            target.hidden_size,
            config.target_hidden_size == target.hidden_size,
        ),
        (
            "width of the draft layers against the shared embeddings",
            backbone.hidden_size,
            target.hidden_size,
            backbone.hidden_size == target.hidden_size,
        ),
        (
            "number of target layers",
            trained_layers,
            num_layers,
            trained_layers == num_layers,
        ),
        (
            "tapped layer (the last layer's output is not tapped)",
            last_tap,
            f"layers up to {num_layers - 2}",
            last_tap <= num_layers - 2,
        ),
        ("RoPE", _rope_of(backbone), _rope_of(target), _same_rope(backbone, target)),
        (
            "mask_token_id",
            config.mask_token_id,
            f"ids up to {target.vocab_size - 1}",
            config.mask_token_id < target.vocab_size,
        ),
        (
            "block size",
            config.block_size,
            f"max_position_embeddings {target.max_position_embeddings}",
            config.block_size < target.max_position_embeddings,
        ),
    )
    for what, drafters, targets, fits in checks:
        if not fits:
            raise UnsupportedError(
                f"the drafter does not fit the target: {what}: the drafter has "
                f"{drafters}, the target {targets}"
            )


def to_speculators_json(
    config: DSparkConfig, verifier_name: str, verifier_architecture: str
) -> dict[str, Any]:
    """Return the config.json, in the format of speculators, that parses to `config`.

    Args:
        verifier_name: the target's name or path.
    """
    assert not config.is_rope_interleaved, "undone when the weights were loaded"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_proposed_tokens or config.num_draft_tokens,
    }
    raw: dict[str, Any] = {
        "speculators_model_type": _SPECULATORS_TYPE,
        "architectures": ["DSparkSpeculator"],
        "speculators_version": "0.3.0",
        "transformer_layer_config": _backbone_json(config.backbone),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "speculators_config": {
            "algorithm": _SPECULATORS_TYPE,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier_name,
                "architectures": [verifier_architecture],
            },
        },
    }
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    if config.confidence_temperatures:
        raw["confidence_temperatures"] = list(config.confidence_temperatures)
    if config.allows_short_blocks:
        raw["allows_short_blocks"] = True
    return raw


def _parse_deepspec(raw: dict[str, Any], where: str) -> DSparkConfig:
    fields = _DraftFields(raw, where)
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in _DEEPSPEC_BACKBONES:
        raise UnsupportedError(
            f"{where}: drafter {architecture!r:.80} is not supported, only "
            f"{', '.join(_DEEPSPEC_BACKBONES)} and DSparkSpeculator"
        )
    backbone = _parse_backbone(raw, _DEEPSPEC_BACKBONES[architecture], where)
    return DSparkConfig(
        backbone=backbone,
        target_layer_ids=fields.layer_ids("target_layer_ids", offset=0),
        target_hidden_size=backbone.hidden_size,
        draft_vocab_size=backbone.vocab_size,
        markov_rank=fields.count("markov_rank", 0),
        enable_confidence_head=fields.boolean("enable_confidence_head", False),
        confidence_head_with_markov=fields.boolean(
            "confidence_head_with_markov", False
        ),
        # The format has no key for it: its only reader samples from the anchor.
        sample_from_anchor=fields.boolean("sample_from_anchor", True),
        **_common(fields, raw),
    )


def _parse_speculators(raw: dict[str, Any], where: str) -> DSparkConfig:
    fields = _DraftFields(raw, where)
    kind = raw["speculators_model_type"]
    if kind != _SPECULATORS_TYPE:
        raise UnsupportedError(
            f"{where}: speculators_model_type {kind!r:.80} is not supported, only "
            f"{_SPECULATORS_TYPE!r}"
        )
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise fields.error("transformer_layer_config", "must be an object")
    model_type = layers.get("model_type", "qwen3")
    if model_type not in _SPECULATORS_BACKBONES:
        raise UnsupportedError(
            f"{where}: draft layers of model_type {model_type!r:.80} are not "
            f"supported, only {', '.join(_SPECULATORS_BACKBONES)}"
        )
    backbone = _parse_backbone(layers, _SPECULATORS_BACKBONES[model_type], where)
    config = DSparkConfig(
        backbone=backbone,
        target_layer_ids=fields.layer_ids("aux_hidden_state_layer_ids", offset=-1),
        target_hidden_size=(
            fields.optional_integer("target_hidden_size") or backbone.hidden_size
        ),
        draft_vocab_size=(
            fields.optional_integer("draft_vocab_size") or backbone.vocab_size
        ),
        markov_rank=fields.count("markov_rank", 256),
        enable_confidence_head=fields.boolean("enable_confidence_head", True),
        confidence_head_with_markov=fields.boolean("confidence_head_with_markov", True),
        # Files from before the key predicted each token from its own slot.
        sample_from_anchor=fields.boolean("sample_from_anchor", False),
        **_common(fields, raw),
    )
    advice = _find_advice(raw)
    is_fewer = advice is not None and 1 <= advice < config.num_draft_tokens
    return replace(config, num_proposed_tokens=advice if is_fewer else None)


def _find_advice(raw: dict[str, Any]) -> int | None:
    """Return the number of drafts that a file's default proposal takes."""
    speculators = raw.get("speculators_config")
    if not isinstance(speculators, dict):
        return None
    methods = speculators.get("proposal_methods")
    default = speculators.get("default_proposal_method")
    for method in methods if isinstance(methods, list) else ():
        if isinstance(method, dict) and method.get("proposal_type") == default:
            number = method.get("speculative_tokens")
            return number if type(number) is int else None
    return None


def _common(fields: "_DraftFields", raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that both formats have under the same name."""
    layers = raw.get("transformer_layer_config") or {}
    return {
        "block_size": fields.integer("block_size"),
        "mask_token_id": fields.count("mask_token_id"),
        "markov_head_type": str(raw.get("markov_head_type") or "vanilla"),
        "num_target_layers": fields.optional_integer("num_target_layers"),
        "is_rope_interleaved": any(
            owner.get(key) is True
            for owner in (raw, layers)
            for key in _INTERLEAVED_KEYS
        ),
        "confidence_temperatures": fields.temperatures("confidence_temperatures"),
        "allows_short_blocks": fields.boolean("allows_short_blocks", False),
    }


def _parse_backbone(raw: dict[str, Any], architecture: str, where: str) -> HfConfig:
    if "sliding_attention" in (raw.get("layer_types") or ()):
        raise UnsupportedError(
            f"{where}: layer_types has sliding_attention, which is not supported: such "
            "layers see a window only, and are causal inside a block unless "
            "sliding_window_non_causal is set"
        )
    if raw.get("final_logit_softcapping"):
        raise UnsupportedError(f"{where}: final_logit_softcapping is not supported")
    return parse_hf_config(raw | {"architectures": [architecture]}, where)


def _check_complete(config: DSparkConfig, where: str) -> None:
    vocab_size = config.backbone.vocab_size
    num_temperatures = len(config.confidence_temperatures)
    needs_markov = config.enable_confidence_head and config.confidence_head_with_markov
    faults = (
        (
            config.num_draft_tokens < 1,
            f"block_size {config.block_size} leaves no token to draft",
        ),
        (
            config.markov_head_type not in MARKOV_HEAD_TYPES,
            f"markov_head_type must be one of {', '.join(MARKOV_HEAD_TYPES)}, got "
            f"{config.markov_head_type!r:.80}",
        ),
        (
            config.mask_token_id >= vocab_size,
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of "
            f"{vocab_size}",
        ),
        (
            config.draft_vocab_size > vocab_size,
            f"draft_vocab_size {config.draft_vocab_size} is more than the vocabulary "
            f"of {vocab_size}",
        ),
        (
            needs_markov and config.markov_rank == 0,
            "confidence_head_with_markov needs a markov_rank > 0",
        ),
        (
            num_temperatures not in (0, config.num_draft_tokens),
            f"confidence_temperatures has {num_temperatures} numbers, not one for each "
            f"of {config.num_draft_tokens} drafts",
        ),
    )
    for is_wrong, reason in faults:
        if is_wrong:
            raise CheckpointError(f"{where}: {reason}")


class _DraftFields(JsonFields):
    """The kinds of value that only a drafter's file has."""

    def count(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, "must be an integer >= 0")
        return value

    def layer_ids(self, name: str, offset: int) -> tuple[int, ...]:
        """Return layers by their output, -1 for the embeddings."""
        value = self._raw.get(name)
        if (
            not isinstance(value, list)
            or not value
            or any(isinstance(i, bool) or not isinstance(i, int) for i in value)
        ):
            raise self.error(name, "must be a list of layers")
        ids = tuple(i + offset for i in value)
        if ids[0] < -1 or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise self.error(name, f"must rise, from {-1 - offset} at the lowest")
        return ids

    def temperatures(self, name: str) -> tuple[float, ...]:
        value = self._raw.get(name)
        if value is None:
            return ()
        # JSON's true is an int in Python, and its Infinity a float.
        if not isinstance(value, list) or not all(
            type(t) in (int, float) and 0 < t < math.inf for t in value
        ):
            raise self.error(name, "must be a list of numbers > 0")
        return tuple(float(t) for t in value)


def _rope_of(config: HfConfig) -> str:
    scaling = config.rope_scaling or {"rope_type": "default"}
    return f"theta {config.rope_theta:g}, {scaling}"


def _same_rope(draft: HfConfig, target: HfConfig) -> bool:
    """Whether both rotate keys alike: a drafter is trained with its target's way."""
    if draft.rope_theta != target.rope_theta:
        return False
    scalings = draft.rope_scaling or {}, target.rope_scaling or {}
    if len({"freq_factors" in scaling for scaling in scalings}) == 2:
        # A GGUF file holds the factors themselves, which have no inverse.
        return scalings[0].get("rope_type") == scalings[1].get("rope_type")
    return scalings[0] == scalings[1]


def _backbone_json(config: HfConfig) -> dict[str, Any]:
    model_types = {name: key for key, name in _SPECULATORS_BACKBONES.items()}
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("attention_bias", "mlp_bias", "bos_token_id"),
    )
    return {
        "architectures": [config.architecture],
        "model_type": model_types[config.architecture],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": config.torch_dtype,
        "eos_token_id": list(config.eos_token_ids),
        **{name: getattr(config, name) for name in names},
    }
