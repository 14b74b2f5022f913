"""A trained drafter on disk: a directory in the format of speculators."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file

from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.transformers_utils.configs.dspark import to_speculators_json

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Verifier:
    """The target that a drafter was trained for.

    Args:
        name: or path.
        architecture: such as "LlamaForCausalLM".
    """

    name: str
    architecture: str


def save_speculator(
    folder: str,
    model: DSparkTrainingModel,
    verifier: Verifier,
    draft_token_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a drafter; embeddings and output layer stay with the target.

    Each file is there whole or not at all.

    Args:
        draft_token_ids: [draft_vocab_size] int64, rising, the target's ids that can be
            drafted; None where all can.
        dtype: of the weights in the file.
    """
    config = model.config
    assert (draft_token_ids is not None) == config.has_reduced_vocab, (
        "a reduced vocabulary is named token by token"
    )
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.export().items()
    }
    if draft_token_ids is not None:
        ids = draft_token_ids.cpu()
        t2d = torch.zeros(config.backbone.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    raw = to_speculators_json(config, verifier.name, verifier.architecture)
    os.makedirs(folder, exist_ok=True)
    # The configuration last: a directory with one is complete.
    _replace(folder, _WEIGHTS, lambda path: save_file(tensors, path))
    _replace(folder, _CONFIG, lambda path: _write_json(path, raw))


def load_training_weights(folder: str, model: DSparkTrainingModel) -> None:
    """Read the weights of a directory that `save_speculator` wrote.

    Raises:
        RuntimeError: they are of a model of another shape.
    """
    tensors = load_file(os.path.join(folder, _WEIGHTS))
    weights = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    model.load_state_dict(weights)


def _write_json(path: str, raw: dict[str, object]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(raw, file, indent=2)
        file.write("\n")


def _replace(folder: str, name: str, write: Callable[[str], None]) -> None:
    """Write a file beside its place, and move it there when it is complete."""
    path = os.path.join(folder, f".{name}.partial")
    write(path)
    os.replace(path, os.path.join(folder, name))
