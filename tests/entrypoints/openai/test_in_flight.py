"""Streams that fail, clients that leave, servers that stop: over a real socket."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import call, read_events, run_server, wait_until
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineOverloadedError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextmanager
def serving(**fields: object) -> Iterator[tuple[str, FakeEngine]]:
    engines: list[FakeEngine] = []

    def build() -> object:
        engines.append(FakeEngine(**fields))  # type: ignore[arg-type]
        return make_app(engines[0])

    with run_server(build) as url:
        yield url, engines[0]


def send(url: str, body: dict, path: str = COMPLETIONS) -> socket.socket:
    """Send a request and return its socket, without reading the answer."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port))
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 4}, {"prompt": ["a", "b", "c"]}])
def test_request_ends_when_the_client_leaves(stream: bool, fields: dict) -> None:
    with serving(answer="x" * 2000, step_delay_s=0.005) as (url, engine):
        body = {"prompt": "a", "max_tokens": 2000, "stream": stream} | fields
        connection = send(url, body)
        wait_until(lambda: engine.num_running > 0)
        if stream:
            assert connection.recv(10)
        connection.close()
        wait_until(lambda: engine.num_running == 0, timeout_s=2)
        assert httpx.get(f"{url}/health").status_code == 200


def test_request_ends_when_the_client_leaves_before_the_first_token() -> None:
    with serving(step_delay_s=30) as (url, engine):
        connection = send(url, {"prompt": "a", "stream": True})
        wait_until(lambda: engine.num_running == 1)
        connection.close()
        wait_until(lambda: engine.num_running == 0, timeout_s=2)


def test_many_clients_that_leave_leave_nothing_behind() -> None:
    with serving(answer="x" * 500, step_delay_s=0.002) as (url, engine):
        for number in range(50):
            send(
                url, {"prompt": "a", "max_tokens": 500, "stream": number % 2 == 0}
            ).close()
        wait_until(lambda: engine.num_running == 0, timeout_s=5)
        answer = httpx.post(
            f"{url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1}
        )
        assert answer.json()["choices"][0]["text"] == "x"


async def test_failure_before_the_first_token_is_a_status() -> None:
    error = VLLMValidationError("the grammar does not compile", parameter="regex")
    engine = FakeEngine(fails_after=0, error=error)
    response = await call(
        make_app(engine), COMPLETIONS, {"prompt": "a", "stream": True}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "regex"


async def test_engine_without_room_is_503_and_says_why() -> None:
    engine = FakeEngine(fails_after=0, error=EngineOverloadedError("no thread is free"))
    response = await call(make_app(engine), COMPLETIONS, {"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no thread is free"


async def test_failure_in_a_stream_is_an_event_before_done() -> None:
    engine = FakeEngine(fails_after=2)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    response = await call(make_app(engine), CHAT, body)
    assert response.status_code == 200
    events = read_events(response)
    assert events[-2]["choices"][0]["delta"]["content"] == " "
    error = events[-1]["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "secret" not in response.text
    assert engine.num_running == 0


def test_client_that_breaks_off_a_connection_is_no_error() -> None:
    with serving(answer="x" * 50, step_delay_s=0.01) as (url, engine):
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"prompt"')
        connection.close()
        assert httpx.get(f"{url}/health").status_code == 200
        assert engine.prompts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_dead_engine_is_503(stream: bool) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.die("out of memory at /secret")
    response = await call(app, COMPLETIONS, {"prompt": "a", "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text


def test_requests_in_flight_learn_that_the_engine_died() -> None:
    with serving(answer="x" * 100, step_delay_s=0.2) as (url, engine):
        waiting = send(url, {"prompt": "a"})
        wait_until(lambda: engine.num_running == 1)
        engine.death = RuntimeError  # type: ignore[assignment]
        from vllm.exceptions import EngineDeadError

        engine.death = EngineDeadError("gone")
        assert b" 503 " in waiting.recv(100)
        waiting.close()
