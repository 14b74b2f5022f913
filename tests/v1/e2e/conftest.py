"""The tiny model, written once for a file of tests."""

from pathlib import Path

import pytest

from tests.v1.e2e.tiny_engine import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
