"""Who gets the dashboard, and what the page is allowed to do."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import call
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.dashboard.collector import Dashboard

PICTURE = Path(
    __file__, "../../../../docs/features/speculative_decoding/dashboard.png"
).resolve()
PAGE, DATA = "/dashboard", "/dashboard/data"


def make_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.dashboard = Dashboard(engine.vllm_config, engine.tokenizer)
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 0.0)
    output = EngineCoreOutput("a request?&", [40], events=[event])
    engine.dashboard.trace(EngineCoreOutputs([output]))
    return engine


@pytest.mark.parametrize("path", [PAGE, DATA])
async def test_there_is_no_dashboard_unasked(path: str) -> None:
    assert (await call(make_app(), path)).status_code == 404


async def test_the_page_is_html_that_loads_nothing_from_elsewhere() -> None:
    response = await call(make_app(make_engine()), PAGE)
    assert response.headers["Content-Type"].startswith("text/html")
    elsewhere = re.findall(
        r"(?:src|href|url\(|import)\s*=?\s*[\"']?https?:", response.text
    )
    assert elsewhere == []
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy


async def test_the_data_tells_one_request_in_detail() -> None:
    app = make_app(make_engine())
    data: dict[str, Any] = (await call(app, DATA)).json()
    assert data["server"]["model"] == "fake"
    assert [one["key"] for one in data["requests"]] == ["a request?&"]
    assert data["request"] is None
    detailed = (await call(app, f"{DATA}?request=a%20request%3F%26")).json()
    assert detailed["request"]["summary"]["num_tokens"] == 1
    assert (await call(app, f"{DATA}?request=gone")).json()["request"] is None


async def test_the_data_needs_a_key_and_the_page_that_asks_for_it_does_not() -> None:
    app = make_app(make_engine(), api_key=("secret",))
    assert (await call(app, PAGE)).status_code == 200
    assert (await call(app, DATA)).status_code == 401
    assert (await call(app, f"{PAGE}/")).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert (await call(app, DATA, headers=headers)).status_code == 200


async def test_the_page_is_no_part_of_the_api() -> None:
    document = (await call(make_app(make_engine()), "/openapi.json")).json()
    assert not [path for path in document["paths"] if "dashboard" in path]


def test_a_dashboard_needs_statistics() -> None:
    with pytest.raises(VLLMValidationError) as error:
        EngineArgs(enable_dashboard=True, disable_log_stats=True)
    assert error.value.parameter == "enable_dashboard"


def test_a_dashboard_needs_a_server() -> None:
    config = make_engine().vllm_config
    observability = replace(config.observability_config, enable_dashboard=True)
    with pytest.raises(VLLMValidationError) as error:
        LLMEngine(replace(config, observability_config=observability))
    assert error.value.parameter == "enable_dashboard"


def test_the_picture_in_the_documentation_is_as_wide_as_the_page_and_small() -> None:
    image = PICTURE.read_bytes()
    assert struct.unpack(">I", image[16:20]) == (1280,)
    assert len(image) < 300_000
