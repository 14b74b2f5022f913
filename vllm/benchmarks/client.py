"""One streamed request to an OpenAI-compatible server, with its times."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.benchmarks.event_stream import Endpoint, StreamError


@dataclass
class RequestResult:
    """What one request took.

    Args:
        num_prompt_tokens: as the server counted; the asked length if it did not say.
        ttft_s: seconds to the first token.
        itl_s: seconds between two chunks that carry tokens.
        latency_s: seconds to the end of the answer.
        start_s: seconds of `time.perf_counter` at the start.
        error: why it failed; empty if it did not.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    start_s: float = 0.0
    text: str = ""
    error: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    """What is read of a chunk, of completions or chat completions."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


async def send_request(
    endpoint: Endpoint, body: dict[str, Any], num_prompt_tokens: int
) -> RequestResult:
    """Stream one answer.

    Args:
        endpoint: the completions or chat completions route.
        body: the request; streaming with usage is added.
        num_prompt_tokens: the length that was asked for.

    Returns:
        The times; with `error` set when the answer is not a complete one.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    result = RequestResult(num_prompt_tokens=num_prompt_tokens)
    result.start_s = last_s = time.perf_counter()
    num_chunks = 0

    def take_event(data: bytes) -> None:
        nonlocal last_s, num_chunks
        now_s = time.perf_counter()
        if data == b"[DONE]" or not _read_chunk(_DECODER.decode(data), result):
            return
        if num_chunks:
            result.itl_s.append(now_s - last_s)
        else:
            result.ttft_s = now_s - result.start_s
        num_chunks += 1
        last_s = now_s

    try:
        await endpoint.post(json.dumps(body).encode(), take_event)
    except StreamError as error:
        result.error = str(error)
        return result
    except ValueError as error:
        result.error = f"an event is no chunk of an answer: {error}"
        return result
    result.latency_s = last_s - result.start_s
    result.num_output_tokens = result.num_output_tokens or num_chunks
    if not num_chunks and not result.error:
        result.error = "the answer held no token"
    return result


def _read_chunk(chunk: _Chunk, result: RequestResult) -> bool:
    """Take a chunk's text and counts into `result`; return whether it has tokens."""
    error = chunk.error
    if error is not None:
        message = error.get("message", error) if isinstance(error, dict) else error
        result.error = str(message)
        return False
    if chunk.usage:
        result.num_prompt_tokens = chunk.usage.prompt_tokens
        result.num_output_tokens = chunk.usage.completion_tokens
    if not chunk.choices:
        return False
    choice = chunk.choices[0]
    text = choice.text if choice.delta is None else choice.delta.content
    # The first chunk of a chat names the role and has no token yet.
    has_tokens = bool(text) or bool(choice.finish_reason)
    result.text += text or ""
    return has_tokens
