from pathlib import Path

import pytest

from tests.v1.engine.fakes import save_tokenizer
from vllm.transformers_utils.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_path(str(path))
