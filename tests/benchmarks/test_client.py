"""One streamed request: its text, its counts, its times, and why it failed."""

import json

import pytest

from tests.benchmarks.byte_server import OK, chunked, serve_bytes, until_close
from vllm.benchmarks.client import send_request
from vllm.benchmarks.event_stream import Endpoint


def event(value) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "index": 0, "finish_reason": reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"


async def send(*pieces: bytes, pause_s: float = 0.0):
    async with serve_bytes(*pieces, pause_s=pause_s) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.port}/v1/completions")
        return await send_request(endpoint, {"model": "m"}, 9)


async def test_text_and_counts_are_those_of_the_answer():
    answer = chunked(piece("ä"), piece(" b"), piece("", "stop"), USAGE, DONE)
    result = await send(answer)
    assert result.error == ""
    assert result.text == "ä b"
    assert (result.num_prompt_tokens, result.num_output_tokens) == (7, 5)
    assert len(result.itl_s) == 2


async def test_without_usage_pieces_are_counted():
    result = await send(chunked(piece("a"), piece("b"), DONE))
    assert (result.num_prompt_tokens, result.num_output_tokens) == (9, 2)


async def test_a_request_asks_for_a_stream_with_usage():
    async with serve_bytes(chunked(piece("a"))) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.port}/v1/completions")
        await send_request(endpoint, {"model": "m", "stream": False}, 1)
    assert json.loads(server.requests[0].partition(b"\r\n\r\n")[2]) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_times_are_those_of_pieces_with_tokens():
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    words = [event({"choices": [{"delta": {"content": text}}]}) for text in "ab"]
    result = await send(
        until_close(role), words[0], words[1], USAGE + DONE, pause_s=0.05
    )
    assert result.text == "ab"
    # Each piece comes a pause after the one before, and the end of the answer last.
    assert result.ttft_s >= 0.05
    assert result.itl_s[0] >= 0.04
    assert result.latency_s == pytest.approx(result.ttft_s + result.itl_s[0])
    assert len(result.itl_s) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"message": "the engine has stopped", "code": 500}, "the engine has stopped"),
        ({"code": 500}, "{'code': 500}"),
        ("out of memory", "out of memory"),
    ],
)
async def test_an_error_within_the_stream_is_the_results(error, reason):
    result = await send(chunked(piece("a"), event({"error": error}), DONE))
    assert result.error == reason
    assert result.text == "a"


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {not json}\n\n",
        b"data: []\n\n",
        b'data: {"choices": [{"text": 5}]}\n\n',
        b'data: {"choices": [{"text": "\xff"}]}\n\n',
    ],
)
async def test_an_event_that_is_no_chunk_is_an_error(bad):
    result = await send(chunked(piece("a"), bad, DONE))
    assert result.error.startswith("an event is no chunk of an answer: ")


async def test_an_answer_that_ends_within_an_event_is_an_error():
    result = await send(until_close(piece("a") + piece("b")[:20]))
    assert result.error.startswith("an event is no chunk of an answer: ")


async def test_a_refusal_is_the_results_error():
    body = b'{"error": {"message": "no such model"}}'
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b"
    result = await send(refusal % (len(body), body))
    assert result.error == f"HTTP 404: {body.decode()}"


async def test_a_close_within_the_answer_is_the_results_error():
    result = await send(chunked(piece("a"), piece("b"))[:-5])
    assert result.error == "the server closed within its answer"
    assert result.latency_s == 0.0


@pytest.mark.parametrize("answer", [chunked(USAGE, DONE), OK + b"\r\n"])
async def test_an_answer_without_a_token_is_an_error(answer):
    assert (await send(answer)).error == "the answer held no token"
