"""What every test needs: a device, and Triton's interpreter where there is no GPU."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.units import find_place, find_unit

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Before any kernel is defined: `triton.jit` reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole units to the processes, in the order of the collection."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class UnitScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_unit(nodeid)

    # By itself it would begin with the unit of the most tests.
    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A long unit that begins last runs alone at the end.
    items.sort(key=lambda item: find_place(item.nodeid))
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what engines remember from one start to the next away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def embedded_model() -> str:
    """Return the path of SmolLM2-135M-Instruct, the model served by default."""
    from vllm.transformers_utils.model_files import resolve_model_path

    return resolve_model_path(None)


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, object], None]:
    """Return what makes a model, and a folder or a drafter, the embedded ones."""
    from vllm.transformers_utils import model_files

    def replace(model: object, drafter: object) -> None:
        monkeypatch.setattr(model_files, "embedded_model_path", lambda: str(model))
        monkeypatch.setattr(
            model_files, "embedded_drafter_folder", lambda: str(drafter)
        )

    return replace


@pytest.fixture(scope="session")
def embedded_drafter() -> str:
    """Return the folder of the drafter that is used by default."""
    from vllm.transformers_utils.model_files import find_embedded_drafter

    folder = find_embedded_drafter()
    assert folder is not None, "the package comes with a drafter"
    return folder
