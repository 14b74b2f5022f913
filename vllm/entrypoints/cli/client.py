"""What `vllm chat` and `vllm complete` share: the server's address and its stream."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from vllm import envs
from vllm.exceptions import UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def client_parser(prog: str, description: str) -> FlexibleArgumentParser:
    """Return a parser with the flags of both commands."""
    parser = FlexibleArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)"
    )
    parser.add_argument("--model-name", help="default: the first that the server lists")
    parser.add_argument("--api-key", help="default: VLLM_API_KEY or OPENAI_API_KEY")
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", help="send this, print the answer, and end"
    )
    parser.add_argument("--max-tokens", type=int, help="of each answer")
    return parser


class ServerClient:
    """A running server.

    Args:
        url: with the `/v1` at its end.
        model: None is the first that the server lists.

    Raises:
        UnsupportedError: nobody answers there, or with an error.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        key = api_key or envs.VLLM_API_KEY or os.environ.get("OPENAI_API_KEY")
        self._url = url.rstrip("/")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(600.0, connect=10.0),
            trust_env=False,
        )
        self.model = model or self._first_model()

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer.

        Raises:
            UnsupportedError: the server refuses, or the connection ends.
        """
        body = body | {"model": self.model, "stream": True}
        url = self._url + route
        try:
            with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise UnsupportedError(_message(response))
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[len("data: ") :])
                        if "error" in chunk:
                            raise UnsupportedError(str(chunk["error"]["message"]))
                        yield chunk
        except httpx.HTTPError as error:
            raise UnsupportedError(f"no answer from {self._url}: {error}") from None

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self._url}/models")
        except httpx.HTTPError as error:
            raise UnsupportedError(f"no server at {self._url}: {error}") from None
        if response.status_code != 200:
            raise UnsupportedError(_message(response))
        return str(response.json()["data"][0]["id"])


def read_lines(prompt: str) -> Iterator[str]:
    """Yield what the user types until the end of the input, without blank lines."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def show(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
