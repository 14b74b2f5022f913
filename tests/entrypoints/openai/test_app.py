from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.entrypoints.openai.fake_engine import (
    FakeEngine,
    make_app,
    make_fake_config,
)
from tests.entrypoints.openai.serving import call, connect, read_events
from vllm.version import __version__


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_an_empty_200(path: str) -> None:
    response = await call(make_app(), path)
    assert (response.status_code, response.content) == (200, b"")


async def test_ping_can_be_posted() -> None:
    assert (await call(make_app(), "/ping", {})).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_of_a_dead_engine_is_503(path: str) -> None:
    engine = FakeEngine()
    engine.die("gone")
    assert (await call(make_app(engine), path)).status_code == 503


async def test_version_is_told() -> None:
    assert (await call(make_app(), "/version")).json() == {"version": __version__}


async def test_every_served_name_is_listed_and_answers() -> None:
    config = make_fake_config(served_model_name=("small", "org/alias"))
    app = make_app(FakeEngine(vllm_config=config))
    models = (await call(app, "/v1/models")).json()
    assert models["object"] == "list"
    assert [card["id"] for card in models["data"]] == ["small", "org/alias"]
    card = models["data"][0]
    assert (card["object"], card["owned_by"]) == ("model", "vllm")
    assert card["max_model_len"] == 4096
    for name in ("small", "org/alias"):
        answer = await call(app, "/v1/completions", {"prompt": "a", "model": name})
        assert answer.json()["model"] == name
        assert (await call(app, f"/v1/models/{name}")).json()["id"] == name


async def test_models_do_not_tell_paths() -> None:
    config = make_fake_config(model="/home/me/model")
    response = await call(make_app(FakeEngine(vllm_config=config)), "/v1/models")
    assert "/home" not in response.text


async def test_unknown_model_is_404() -> None:
    response = await call(make_app(), "/v1/models/nope")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_metrics_can_be_parsed() -> None:
    app = make_app()
    await call(app, "/health")
    response = await call(app, "/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"http_requests", "http_request_duration_seconds"} <= names


async def test_load_is_served_with_the_flag_only() -> None:
    assert (await call(make_app(), "/load")).status_code == 404
    response = await call(make_app(enable_server_load_tracking=True), "/load")
    assert response.json() == {"server_load": 0}


async def test_prefix_cache_can_be_reset_by_developers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    assert (await call(make_app(engine), "/reset_prefix_cache", {})).status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert (await call(make_app(engine), "/reset_prefix_cache", {})).status_code == 200
    assert engine.num_resets == 1


async def test_docs_can_be_switched_off() -> None:
    for path in ("/docs", "/openapi.json"):
        assert (await call(make_app(), path)).status_code == 200
        app = make_app(disable_fastapi_docs=True)
        assert (await call(app, path)).status_code == 404


async def openapi(app: Any) -> dict[str, Any]:
    return (await call(app, "/openapi.json")).json()


async def test_openapi_describes_every_route_without_dangling_references() -> None:
    document = await openapi(make_app())
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
    } <= set(document["paths"])
    schemas = document["components"]["schemas"]

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].rpartition("/")[2] in schemas
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(document)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "logprobs": True,
                "top_logprobs": 2,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            },
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/completions", {}),
    ],
)
async def test_answers_fit_their_description(path: str, body: dict) -> None:
    app = make_app()
    document = await openapi(app)
    response = await call(app, path, body)
    responses = document["paths"][path]["post"]["responses"]
    described = responses["200" if response.status_code == 200 else "4XX"]
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(
        response.json(), schema | {"components": document["components"]}
    )


async def test_chunks_fit_their_description() -> None:
    app = make_app()
    document = await openapi(app)
    schema = {"$ref": "#/components/schemas/ChatCompletionChunk"}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }
    for event in read_events(await call(app, "/v1/chat/completions", body)):
        jsonschema.validate(event, schema | {"components": document["components"]})


async def test_stream_is_declared_as_events_and_not_cached() -> None:
    async with connect(make_app()) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "a", "stream": True}
        )
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
