"""Weights from safetensors files in a directory."""

import json
import os

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.model_executor.model_loader.weight_slots import WeightSlots

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth")
# Saved by old versions; the model computes them.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
_TIED = "lm_head.weight"


def load_safetensors(folder: str, slots: WeightSlots, show_progress: bool) -> None:
    """Fill the slots from a directory.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, extra or misshapen.
        UnsupportedError: the weights are in another format or quantised.
    """
    files = _find_files(folder)
    for name, expected in tqdm(
        files.items(),
        desc="Loading safetensors checkpoint shards",
        disable=not show_progress,
    ):
        _load_file(os.path.join(folder, name), expected, slots)
    slots.check_all_taken(folder)


def list_tensor_names(folder: str) -> set[str]:
    """Return the names of all tensors in a directory.

    Raises:
        CheckpointError: there are no weights, or a file is damaged.
        UnsupportedError: the weights are in another format.
    """
    names: set[str] = set()
    for file_name in _find_files(folder):
        path = os.path.join(folder, file_name)
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
    return names


def _find_files(folder: str) -> dict[str, set[str]]:
    """Return file name -> the tensors that the index says are in it."""
    if os.path.isfile(os.path.join(folder, _INDEX)):
        return _read_index(folder)
    if os.path.isfile(os.path.join(folder, _SINGLE)):
        return {_SINGLE: set()}
    names = sorted(os.listdir(folder))
    found = [name for name in names if name.endswith(".safetensors")]
    if found:
        return {name: set() for name in found}
    if any(name.endswith(_PICKLES) for name in names):
        raise UnsupportedError(
            f"{folder}: the weights are pickles, which can run code when they are "
            "read: convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: there is no {_SINGLE} and no {_INDEX}")


def _read_index(folder: str) -> dict[str, set[str]]:
    path = os.path.join(folder, _INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        pairs = [(str(name), str(tensor)) for tensor, name in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not an index of weights: {error}") from None
    files: dict[str, set[str]] = {}
    for name, tensor in sorted(pairs):
        if os.path.basename(name) != name:
            raise CheckpointError(f"{path}: {name!r:.80} is outside the directory")
        if not os.path.isfile(os.path.join(folder, name)):
            raise CheckpointError(
                f"{path}: tensor {tensor} is in {name}, which is not there"
            )
        files.setdefault(name, set()).add(tensor)
    return files


def _load_file(path: str, expected: set[str], slots: WeightSlots) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            absent = sorted(expected - names)
            if absent:
                raise CheckpointError(
                    f"{path}: tensor {absent[0]} is not there, though the index says so"
                )
            for name in sorted(names):
                if not _is_ignored(name, slots):
                    _load_tensor(name, file.get_tensor(name), path, slots)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: is truncated or damaged: {error}; download it again"
    )


def _load_tensor(
    name: str, tensor: torch.Tensor, path: str, slots: WeightSlots
) -> None:
    is_weight = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
    if not is_weight and not slots.is_table(name):
        raise UnsupportedError(
            f"{path}: tensor {name} is quantised ({tensor.dtype}), which is not "
            "supported"
        )
    slot = slots.take(name, tuple(tensor.shape), path)
    if is_weight != slot.is_floating_point():
        raise CheckpointError(f"{path}: tensor {name} holds {tensor.dtype}")
    slot.copy_(tensor)


def _is_ignored(name: str, slots: WeightSlots) -> bool:
    if name.endswith(_COMPUTED_SUFFIX):
        return True
    # With tied embeddings the copy that some files hold is not used.
    return name == _TIED and name not in slots
