"""What the offline benchmarks share: the engine's flags, and the engine."""

import argparse
from dataclasses import asdict

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def engine_parser(prog: str, description: str) -> FlexibleArgumentParser:
    """Return a parser with the engine's flags."""
    parser = FlexibleArgumentParser(prog=prog, description=description)
    parser.add_config_argument()
    EngineArgs.add_cli_args(parser)
    return parser


def make_llm(parser: FlexibleArgumentParser, args: argparse.Namespace) -> LLM:
    """Start the engine that the flags describe; a wrong flag exits with code 2."""
    try:
        engine_args = EngineArgs.from_cli_args(args)
    except VLLMValidationError as error:
        parser.error(str(error))
    return LLM(**asdict(engine_args))
