"""The flags of the server itself, beside those of the engine."""

import argparse
import json
from dataclasses import dataclass, field, fields
from typing import Any

from vllm import envs
from vllm.utils.argparse_utils import json_mapping

CONTENT_FORMATS = ("auto", "string", "openai")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class FrontendArgs:
    """How the server listens and answers.

    Args:
        host: the address to listen on; reachable from this machine only by default.
        uds: path of a Unix socket to listen on instead of host and port.
        api_key: keys of which a request must carry one; empty: no key is needed.
        chat_template_content_format: one of CONTENT_FORMATS, how the template takes a
            message whose content is a list of parts.
        trust_request_chat_template: let a request bring its own chat template.
        disable_access_log_for_endpoints: paths whose requests are not logged.
        allowed_origins: web pages that may call the server; none by default.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = False
    disable_fastapi_docs: bool = False
    disable_uvicorn_access_log: bool = False
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    uvicorn_log_level: str = "info"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> "FrontendArgs":
        """Take this class's part of the flags, and the environment's key."""
        values: dict[str, Any] = {}
        for spec in fields(cls):
            value = getattr(args, spec.name, None)
            if value is not None:
                values[spec.name] = tuple(value) if isinstance(value, list) else value
        if not values.get("api_key") and envs.VLLM_API_KEY:
            values["api_key"] = (envs.VLLM_API_KEY,)
        return cls(**values)


def add_frontend_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the server to `parser`, and return it."""
    _add_listening(parser.add_argument_group("Server", "where it listens"))
    _add_access(parser.add_argument_group("Access", "who may call"))
    _add_chat(parser.add_argument_group("Chat", "how messages become a prompt"))
    _add_answers(parser.add_argument_group("Answers", "what they hold"))
    _add_server_logs(parser.add_argument_group("Server logs", "what is logged"))
    return parser


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default=FrontendArgs.host,
        help="address to listen on; 0.0.0.0 opens the server to the network: give it "
        "an --api-key then (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=_port, default=FrontendArgs.port, help="default: %(default)s"
    )
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="key for HTTPS")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate for HTTPS")
    group.add_argument(
        "--root-path",
        default=FrontendArgs.root_path,
        metavar="PATH",
        help="path that a proxy in front of the server strips",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that requests must carry as a bearer token; may be repeated "
        "(default: VLLM_API_KEY of the environment, else none)",
    )
    for name, text in (
        ("origins", "web pages that may call the server (default: none)"),
        ("methods", "HTTP methods that these pages may use (default: all)"),
        ("headers", "HTTP headers that these pages may send (default: all)"),
    ):
        group.add_argument(
            f"--allowed-{name}", type=_json_strings, metavar="JSON-LIST", help=text
        )
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="let these pages send cookies and authorization",
    )
    group.add_argument(
        "--disable-fastapi-docs",
        action="store_true",
        help="do not serve /docs and /openapi.json",
    )


def _add_chat(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chat-template",
        metavar="FILE-OR-TEXT",
        help="Jinja template to use in place of the model's",
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=CONTENT_FORMATS,
        default=FrontendArgs.chat_template_content_format,
        help="how the template takes content that is a list of parts: joined to a "
        "string, as the list (openai), or as the template's text suggests (auto)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_mapping,
        default={},
        metavar="JSON",
        help="variables for the template that requests may override",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let a request bring its own chat template",
    )


def _add_answers(group: argparse._ArgumentGroup) -> None:
    for name, text in (
        ("return-tokens-as-token-ids", 'show tokens as "token_id:N" in logprobs'),
        (
            "enable-prompt-tokens-details",
            "tell in usage how much of the prompt was cached",
        ),
        ("enable-force-include-usage", "send usage in every stream"),
        ("enable-request-id-headers", "send X-Request-Id with every answer"),
        ("enable-server-load-tracking", "serve the number of open requests at /load"),
    ):
        group.add_argument(f"--{name}", action="store_true", help=text)


def _add_server_logs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--uvicorn-log-level",
        choices=LOG_LEVELS,
        default=FrontendArgs.uvicorn_log_level,
        help="of the HTTP server (default: %(default)s)",
    )
    group.add_argument(
        "--disable-uvicorn-access-log",
        action="store_true",
        help="do not log each HTTP request",
    )
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=_paths,
        metavar="PATHS",
        help="comma-separated paths not to log, such as /health,/metrics",
    )


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}")
    return port


def _paths(text: str) -> tuple[str, ...]:
    return tuple(path.strip() for path in text.split(",") if path.strip())


def _json_strings(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"not a JSON list of strings: {text!r}")
    return tuple(value)
