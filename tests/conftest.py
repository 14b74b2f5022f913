"""What every test needs: a device, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Before any kernel is defined: `triton.jit` reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def embedded_model() -> str:
    """Return the path of SmolLM2-135M-Instruct, the model served by default."""
    from vllm.transformers_utils.model_files import resolve_model_path

    return resolve_model_path(None)
