"""The tiny model and what it says, computed once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.v1.e2e.test_feature_matrix import REQUESTS
from tests.v1.e2e.tiny_engine import TinyEngine, save_tiny_model, visible

# (logprobs mode, grammar backend, names of requests) -> what each of them says.
Expect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expect(model: Path) -> Expect:
    """What every request says alone and without drafts."""

    @cache
    def run_alone(
        mode: str = "raw_logprobs",
        grammar_backend: str = "auto",
        names: tuple[str, ...] = tuple(REQUESTS),
    ) -> dict[str, Any]:
        alone = TinyEngine(
            model,
            enable_prefix_caching=False,
            logprobs_mode=mode,
            structured_outputs_config={"backend": grammar_backend},
        )
        outputs = {name: visible(alone.run([REQUESTS[name]])[0]) for name in names}
        alone.shutdown()
        return outputs

    return run_alone
