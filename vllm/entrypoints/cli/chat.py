"""`vllm chat`: a conversation with a running server."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.cli.client import ServerClient, client_parser, read_lines, show


def run(argv: Sequence[str]) -> int:
    """Talk until the input ends; return the exit code."""
    parser = client_parser("vllm chat", "Talk to a running server.")
    parser.add_argument("--system-prompt", help="how the model should behave")
    args = parser.parse_args(argv)
    client = ServerClient(args.url, args.api_key, args.model_name)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    for text in [args.quick] if args.quick is not None else read_lines("> "):
        messages.append({"role": "user", "content": text})
        answer = _answer(client, messages, args.max_tokens)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(
    client: ServerClient, messages: list[dict[str, str]], max_tokens: int | None
) -> str:
    body: dict[str, Any] = {"messages": messages}
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    answer = ""
    for chunk in client.stream("/chat/completions", body):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            show(piece)
            answer += piece
    show("\n")
    return answer
