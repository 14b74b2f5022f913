"""Reading of streamed answers, from servers that send exact bytes."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from tests.benchmarks.byte_server import (
    OK,
    chunked,
    serve_bytes,
    until_close,
    with_length,
)
from vllm.benchmarks.event_stream import Endpoint, EventStream, StreamError

EVENTS = "data: one\n\ndata: zwölf 🙂\r\n\r\n: a comment\ndata:three\n\n".encode()
DATA = [b"one", "zwölf 🙂".encode(), b"three"]
BODIES = {
    "chunked": chunked(EVENTS[:7], EVENTS[7:20], EVENTS[20:]),
    "with_length": with_length(EVENTS),
    "until_close": until_close(EVENTS),
}


async def read(server, **settings):
    """Return the events of one answer."""
    events: list[bytes] = []
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}/v1/x", **settings)
    await endpoint.post(b"{}", events.append)
    return events


async def read_error(*pieces, holds=False, **settings):
    """Return the events of one answer, and why it is not complete."""
    events: list[bytes] = []
    async with serve_bytes(*pieces, holds=holds) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.port}", **settings)
        with pytest.raises(StreamError) as raised:
            await endpoint.post(b"{}", events.append)
    return events, str(raised.value)


@pytest.mark.parametrize("name", BODIES)
async def test_events_of_every_kind_of_body_are_handed_over(name):
    async with serve_bytes(BODIES[name]) as server:
        assert await read(server) == DATA


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_may_come_byte_by_byte(name):
    pieces = [bytes([byte]) for byte in BODIES[name]]
    async with serve_bytes(*pieces) as server:
        assert await read(server) == DATA


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_may_be_split_anywhere(name):
    for place in range(len(BODIES[name]) + 1):
        events: list[bytes] = []
        stream = EventStream(events.append)
        stream.data_received(BODIES[name][:place])
        stream.data_received(BODIES[name][place:])
        if name == "until_close":
            stream.connection_lost(None)
        await stream.wait(1.0)
        assert events == DATA


async def test_an_event_is_handed_over_when_its_line_is_complete():
    events: list[bytes] = []
    stream = EventStream(events.append)
    stream.data_received(OK + b"\r\ndata: one\ndata: t")
    assert events == [b"one"]
    stream.data_received(b"wo\n")
    assert events == [b"one", b"two"]


@pytest.mark.parametrize("name", ["chunked", "with_length"])
async def test_an_answer_with_a_length_ends_without_a_close(name):
    async with serve_bytes(BODIES[name], holds=True) as server:
        assert await read(server) == DATA
        await asyncio.wait_for(server.is_left.wait(), 5)


async def test_a_last_line_needs_no_end():
    async with serve_bytes(until_close(b"data: one\n\ndata: half")) as server:
        assert await read(server) == [b"one", b"half"]


async def test_what_follows_an_answer_is_ignored():
    async with serve_bytes(with_length(EVENTS) + b"data: more\n\n") as server:
        assert await read(server) == DATA


async def test_an_interim_answer_is_skipped():
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    async with serve_bytes(interim, chunked(EVENTS)) as server:
        assert await read(server) == DATA


async def test_a_request_has_its_headers_and_its_length():
    async with serve_bytes(with_length(b"")) as server:
        url = f"http://user@127.0.0.1:{server.port}/v1/x y?a=b c#d"
        endpoint = Endpoint(url, {"Authorization": "Bearer key"})
        await endpoint.post('{"é": 1}'.encode(), lambda data: None)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/x%20y?a=b%20c HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}" in lines
    assert "Authorization: Bearer key" in lines
    assert "Content-Type: application/json" in lines
    assert "Content-Length: 9" in lines
    assert body.decode() == '{"é": 1}'


@pytest.mark.parametrize(
    "refusal",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\n\r\ndata: none\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\ndata: none\r\n",
        # Cut: what is there of it says more than that it is not all.
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 99\r\n\r\ndata: none\r\n",
    ],
)
async def test_a_refusal_says_its_status_and_its_body(refusal):
    assert await read_error(refusal) == ([], "HTTP 404: data: none\r\n")


async def test_a_redirection_is_not_followed():
    there = b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"
    assert await read_error(there) == ([], "HTTP 302: ")


@pytest.mark.parametrize("name", ["chunked", "with_length"])
@pytest.mark.parametrize(("num_missing", "num_events"), [(1, 3), (10, 2)])
async def test_a_close_within_an_answer_is_an_error_after_its_events(
    name, num_missing, num_events
):
    events, reason = await read_error(BODIES[name][:-num_missing])
    assert events == DATA[:num_events]
    assert reason == "the server closed within its answer"


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
async def test_a_close_before_an_answer_is_an_error(start):
    assert await read_error(start) == ([], "the server closed before its answer")


async def test_a_reset_is_no_end_of_a_body_that_ends_with_the_connection():
    stream = EventStream(lambda data: None)
    stream.data_received(until_close(EVENTS))
    stream.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(StreamError, match="closed within its answer: reset"):
        await stream.wait(1.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-server\r\n",
        b"HTTP/1.1 none\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
    ],
)
async def test_what_is_not_http_is_an_error(answer):
    _, reason = await read_error(answer, holds=True)
    assert reason.startswith("the answer is not HTTP: ")


async def test_events_before_a_broken_chunk_are_handed_over():
    broken = chunked(b"data: one\n\n").replace(b"\r\n0\r\n", b"\r\nnone\r\n")
    events, reason = await read_error(broken, holds=True)
    assert events == [b"one"]
    assert reason.startswith("the answer is not HTTP: ")


@pytest.mark.parametrize("name", BODIES)
async def test_what_the_taker_raises_ends_the_answer(name):
    events: list[bytes] = []

    def take(data: bytes) -> None:
        events.append(data)
        raise LookupError("no such piece")

    async with serve_bytes(BODIES[name], holds=True) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.port}")
        with pytest.raises(LookupError, match="no such piece"):
            await endpoint.post(b"{}", take)
        await asyncio.wait_for(server.is_left.wait(), 5)
    assert events == DATA[:1]


async def test_nobody_there_is_an_error():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.raises(StreamError, match="no connection: .*Errno 111"):
        await Endpoint(f"http://127.0.0.1:{port}").post(b"{}", lambda data: None)


async def test_a_server_that_never_encrypts_is_given_up():
    async with serve_bytes(holds=True) as server:
        endpoint = Endpoint(f"https://127.0.0.1:{server.port}", connect_limit_s=0.05)
        with pytest.raises(StreamError, match="no connection: none within 0.05 s"):
            await endpoint.post(b"{}", lambda data: None)


async def test_a_silent_server_is_given_up_and_left():
    async with serve_bytes(until_close(EVENTS), holds=True) as server:
        with pytest.raises(StreamError, match="silent for 0.05 s"):
            await read(server, silence_limit_s=0.05)
        await asyncio.wait_for(server.is_left.wait(), 5)


async def test_an_answer_may_take_longer_than_the_longest_silence():
    stream = EventStream(lambda data: None)
    waiting = asyncio.create_task(stream.wait(0.4))
    start_s = time.perf_counter()
    stream.data_received(OK + b"\r\n")
    while time.perf_counter() - start_s < 0.8:
        await asyncio.sleep(0.02)
        assert not waiting.done()
        stream.data_received(b"data: one\n")
    stream.connection_lost(None)
    await waiting


async def test_a_cancelled_request_closes_its_connection():
    async with serve_bytes(until_close(EVENTS), holds=True) as server:
        task = asyncio.create_task(read(server))
        while not server.requests:
            await asyncio.sleep(0.001)
        assert not server.is_left.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.is_left.wait(), 5)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Of 127.0.0.1, by itself: a server's context, and the file that trusts it."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("certificate")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    )
    command += " -subj /CN=loopback -addext subjectAltName=IP:127.0.0.1 -days 1"
    subprocess.run(
        [*command.split(), "-keyout", folder / "key", "-out", folder / "certificate"],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return context, folder / "certificate"


@pytest.mark.parametrize("name", BODIES)
async def test_an_encrypted_answer_is_read(name, certificate):
    context, path = certificate
    trust = ssl.create_default_context(cafile=path)
    events: list[bytes] = []
    async with serve_bytes(BODIES[name][:50], BODIES[name][50:], tls=context) as server:
        endpoint = Endpoint(f"https://127.0.0.1:{server.port}", tls=trust)
        await endpoint.post(b"{}", events.append)
    assert events == DATA


async def test_an_unknown_certificate_is_refused(certificate):
    context, _ = certificate
    async with serve_bytes(chunked(EVENTS), tls=context) as server:
        endpoint = Endpoint(f"https://127.0.0.1:{server.port}")
        with pytest.raises(StreamError, match="no connection: .*certificate"):
            await endpoint.post(b"{}", lambda data: None)
        assert server.requests == []


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://host/x", {}),
        ("127.0.0.1:8000", {}),
        ("http://", {}),
        ("http://host:port", {}),
        ("http://hóst", {}),
        ("http://host", {"Authorization": "Bearer a\r\nb"}),
        ("http://host", {"Authorization": "Bearer ü"}),
    ],
)
def test_an_address_or_a_header_that_cannot_be_sent_is_refused(url, headers):
    with pytest.raises(StreamError):
        Endpoint(url, headers)
