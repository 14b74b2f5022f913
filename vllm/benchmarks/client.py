"""One streamed request to an OpenAI-compatible server, with its times."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


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


async def send_request(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], num_prompt_tokens: int
) -> RequestResult:
    """Stream one answer.

    Args:
        url: of the completions or chat completions route.
        body: the request; streaming with usage is added.
        num_prompt_tokens: the length that was asked for.

    Returns:
        The times; with `error` set when the answer is not a complete one.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    result = RequestResult(num_prompt_tokens=num_prompt_tokens)
    result.start_s = last_s = time.perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                result.error = f"HTTP {response.status_code}: {text[:500]}"
                return result
            num_chunks = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now_s = time.perf_counter()
                if _read_chunk(json.loads(line[len("data: ") :]), result):
                    if num_chunks:
                        result.itl_s.append(now_s - last_s)
                    else:
                        result.ttft_s = now_s - result.start_s
                    num_chunks += 1
                    last_s = now_s
        result.latency_s = last_s - result.start_s
        result.num_output_tokens = result.num_output_tokens or num_chunks
        if not num_chunks and not result.error:
            result.error = "the answer held no token"
    except (httpx.HTTPError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


def _read_chunk(chunk: dict[str, Any], result: RequestResult) -> bool:
    """Take a chunk's text and counts into `result`; return whether it has tokens."""
    if "error" in chunk:
        result.error = str(chunk["error"].get("message", chunk["error"]))
        return False
    usage = chunk.get("usage")
    if usage:
        result.num_prompt_tokens = usage["prompt_tokens"]
        result.num_output_tokens = usage["completion_tokens"]
    if not chunk.get("choices"):
        return False
    choice = chunk["choices"][0]
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    # The first chunk of a chat names the role and has no token yet.
    has_tokens = bool(text) or bool(choice.get("finish_reason"))
    result.text += text or ""
    return has_tokens
