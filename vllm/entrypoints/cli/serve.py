"""`vllm serve`: start the server."""

from collections.abc import Sequence

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import add_frontend_args
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm serve`."""
    parser = FlexibleArgumentParser(
        prog="vllm serve",
        description="Start a server with the OpenAI API on a language model.",
    )
    parser.add_argument(
        "model_tag",
        nargs="?",
        help="a Hugging Face directory, a GGUF file or a hub name; without it the "
        "embedded SmolLM2-135M-Instruct",
    )
    parser.add_config_argument()
    add_frontend_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Serve until a signal comes; return the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.model_tag is not None:
        if args.model not in (None, args.model_tag):
            parser.error(f"two models: {args.model_tag} and --model {args.model}")
        args.model = args.model_tag
    try:
        AsyncEngineArgs.from_cli_args(args)
    except VLLMValidationError as error:
        parser.error(str(error))
    # It loads the web framework: seconds that a wrong command line need not cost.
    from vllm.entrypoints.openai.api_server import run_server

    run_server(args)
    return 0
