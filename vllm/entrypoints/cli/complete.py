"""`vllm complete`: let a running server go on a text."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.cli.client import ServerClient, client_parser, read_lines, show


def run(argv: Sequence[str]) -> int:
    """Complete each line until the input ends; return the exit code."""
    parser = client_parser("vllm complete", "Let a running server go on a text.")
    args = parser.parse_args(argv)
    client = ServerClient(args.url, args.api_key, args.model_name)
    for text in [args.quick] if args.quick is not None else read_lines("> "):
        body: dict[str, Any] = {"prompt": text}
        if args.max_tokens is not None:
            body["max_tokens"] = args.max_tokens
        for chunk in client.stream("/completions", body):
            for choice in chunk["choices"]:
                show(choice["text"])
        show("\n")
    return 0
