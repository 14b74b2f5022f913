from pathlib import Path

import pytest

from tests.v1.engine.fakes import save_tokenizer
from vllm.transformers_utils.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.from_path(str(tokenizer_path))
