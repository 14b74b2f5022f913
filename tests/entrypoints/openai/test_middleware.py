from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import make_app
from tests.entrypoints.openai.serving import call, connect

KEYS = {"api_key": ("first", "second")}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/fake",
        "/metrics",
        "/version",
        "/openapi.json",
        "/docs",
        "/load",
        "/nope",
    ],
)
async def test_paths_that_reveal_need_a_key(path: str) -> None:
    app = make_app(**KEYS, enable_server_load_tracking=True)
    response = await call(app, path)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == 401
    assert (await call(app, path, headers=bearer("first"))).status_code != 401


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"],
)
async def test_paths_that_compute_need_a_key(path: str) -> None:
    response = await call(make_app(**KEYS), path, {})
    assert response.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_paths_that_tell_nothing_need_none(path: str) -> None:
    assert (await call(make_app(**KEYS), path)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health/../metrics", "/PING"]
)
async def test_paths_that_look_open_need_a_key(path: str) -> None:
    assert (await call(make_app(**KEYS), path)).status_code == 401


@pytest.mark.parametrize("key", ["first", "second"])
async def test_every_key_opens(key: str) -> None:
    app = make_app(**KEYS)
    assert (await call(app, "/v1/models", headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong",
        "Bearer",
        "Basic first",
        "first",
        "Bearer first second",
        "Bearer é",
    ],
)
async def test_wrong_credentials_are_401(header: str) -> None:
    headers = {"Authorization": header.encode("latin-1")}
    async with connect(make_app(**KEYS)) as client:
        response = await client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_without_keys_all_is_open() -> None:
    assert (await call(make_app(), "/v1/models")).status_code == 200


async def test_request_id_of_the_client_comes_back() -> None:
    app = make_app(enable_request_id_headers=True)
    headers = {"X-Request-Id": "mine-1"}
    response = await call(app, "/v1/completions", {"prompt": "a"}, headers=headers)
    assert response.headers["X-Request-Id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"


async def test_request_id_is_made_when_the_client_has_none() -> None:
    app = make_app(enable_request_id_headers=True)
    response = await call(app, "/v1/completions", {"prompt": "a"})
    assert response.json()["id"] == f"cmpl-{response.headers['X-Request-Id']}"


async def test_pages_of_other_sites_may_not_read_by_default() -> None:
    headers = {"Origin": "http://evil.example"}
    response = await call(make_app(), "/v1/models", headers=headers)
    assert "access-control-allow-origin" not in response.headers


async def test_allowed_origin_passes_its_preflight_without_a_key() -> None:
    app = make_app(**KEYS, allowed_origins=("http://good.example",))
    headers = {
        "Origin": "http://good.example",
        "Access-Control-Request-Method": "POST",
    }
    async with connect(app) as client:
        response = await client.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://good.example"


async def metrics_of(app: Any) -> str:
    return (await call(app, "/metrics")).text


async def test_http_requests_are_counted_by_path_and_status() -> None:
    app = make_app()
    await call(app, "/v1/completions", {"prompt": "a"})
    await call(app, "/v1/completions", {})
    text = await metrics_of(app)
    for status in ("2xx", "4xx"):
        assert (
            'http_requests_total{handler="/v1/completions",method="POST",'
            f'status="{status}"}} 1.0'
        ) in text
    labels = '{handler="/v1/completions",method="POST"}'
    assert f"http_request_duration_seconds_count{labels} 2.0" in text


async def test_clients_cannot_add_label_values() -> None:
    app = make_app()
    async with connect(app) as client:
        for number in range(5):
            await client.request(f"VERB{number}", f"/made/up/{number}")
    text = await metrics_of(app)
    assert 'http_requests_total{handler="none",method="other",status="4xx"} 5.0' in text
    assert "made" not in text
