"""Limits on the head of a request, over a real socket."""

import http.client
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import run_server
from vllm.entrypoints.openai import http_protocol
from vllm.entrypoints.openai.limits import MAX_HEADER_BYTES, MAX_HEADERS


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_server(make_app) as url:
        yield url


def talk(url: str, parts: list[bytes]) -> bytes:
    """Send the parts as far as the server takes them; return all that it says."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.settimeout(10)
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            # The server has closed: what it said can still be read, or was lost.
            pass
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


def test_headers_within_the_limits_are_served(url: str) -> None:
    headers = {f"X-{number}": "a" * 300 for number in range(100)}
    assert httpx.get(f"{url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 10 * MAX_HEADER_BYTES])
def test_large_header_is_431(url: str, size: int) -> None:
    response = talk(url, [b"GET /health HTTP/1.1\r\nX: " + b"a" * size + b"\r\n\r\n"])
    assert response.startswith(b"HTTP/1.1 431 ")
    assert b'"code":431' in response


def test_many_headers_are_431(url: str) -> None:
    lines = b"".join(b"X-%d: a\r\n" % number for number in range(MAX_HEADERS + 1))
    response = talk(url, [b"GET /health HTTP/1.1\r\n" + lines + b"\r\n"])
    assert response.startswith(b"HTTP/1.1 431 ")


def test_long_path_is_431(url: str) -> None:
    path = b"/" + b"a" * (MAX_HEADER_BYTES + 1)
    response = talk(url, [b"GET " + path + b" HTTP/1.1\r\n\r\n"])
    assert response.startswith(b"HTTP/1.1 431 ")


def test_endless_header_is_cut_off(url: str) -> None:
    chunk = b"a" * 65536
    parts = [b"GET /health HTTP/1.1\r\nX: ", *[chunk] * 1600]
    response = talk(url, parts)
    assert response == b"" or response.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(f"{url}/health").status_code == 200


def test_second_request_of_a_connection_has_the_limit_too(url: str) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    statuses = []
    for size in (1, MAX_HEADER_BYTES + 1):
        connection.request("GET", "/health", headers={"X": "a" * size})
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    connection.close()
    assert statuses == [200, 431]


def test_large_body_is_not_counted_as_head(url: str) -> None:
    prompt = "a" * (3 * MAX_HEADER_BYTES)
    body = {"prompt": prompt, "truncate_prompt_tokens": 5}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_garbage_is_400_with_the_error_object(url: str) -> None:
    response = talk(url, [b"\x16\x03\x01 hello\r\n\r\n"])
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b'"error":{' in response


def test_slow_head_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.3)
    begun = b"GET /health HTTP/1.1\r\n"
    assert talk(url, [begun]) == b""
    answer = talk(url, [begun + b"Host: a\r\n\r\n" + begun])
    assert answer.count(b"HTTP/1.1 ") == 1


def test_slow_answer_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.1)
    with run_server(lambda: make_app(FakeEngine(step_delay_s=0.5))) as url:
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
