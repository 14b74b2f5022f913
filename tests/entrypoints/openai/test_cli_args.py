import json
from dataclasses import fields

import pytest

from vllm.entrypoints.openai.cli_args import FrontendArgs, add_frontend_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(*argv: str) -> FrontendArgs:
    parser = FlexibleArgumentParser(prog="serve")
    add_frontend_args(parser)
    return FrontendArgs.from_namespace(parser.parse_args(list(argv)))


def test_flags_have_the_defaults_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert parse() == FrontendArgs()
    assert parse().host == "127.0.0.1"


def test_every_field_has_a_flag() -> None:
    parser = FlexibleArgumentParser(prog="serve")
    add_frontend_args(parser)
    namespace = vars(parser.parse_args([]))
    assert {field.name for field in fields(FrontendArgs)} <= set(namespace)


def test_keys_may_be_repeated_and_win_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert parse().api_key == ("env",)
    assert parse("--api-key", "a", "--api-key", "b").api_key == ("a", "b")


def test_values_are_read_in_their_types() -> None:
    args = parse(
        *("--port", "9000", "--default-chat-template-kwargs", '{"a": 1}'),
        *("--disable-access-log-for-endpoints", "/health, /metrics"),
        *("--allowed-origins", json.dumps(["http://a"])),
        "--enable-request-id-headers",
    )
    assert args.port == 9000
    assert args.default_chat_template_kwargs == {"a": 1}
    assert args.disable_access_log_for_endpoints == ("/health", "/metrics")
    assert args.allowed_origins == ("http://a",)
    assert args.enable_request_id_headers


@pytest.mark.parametrize(
    "argv",
    [
        ("--port", "70000"),
        ("--port", "x"),
        ("--allowed-origins", "*"),
        ("--chat-template-content-format", "xml"),
        ("--default-chat-template-kwargs", "[]"),
    ],
)
def test_bad_value_ends_the_command(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
