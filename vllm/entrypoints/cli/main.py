"""The `vllm` command: finds the subcommand, loads only that, and reports its errors."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from vllm import envs
from vllm.exceptions import EngineDeadError, UnsupportedError, VLLMValidationError
from vllm.utils.suggestions import did_you_mean
from vllm.version import __version__

# What a shell says of a program that SIGPIPE has ended.
_BROKEN_PIPE = 141
# Name -> (module with a `run(argv) -> int`, what it does).
COMMANDS = {
    "serve": ("vllm.entrypoints.cli.serve", "start an OpenAI-compatible server"),
    "chat": ("vllm.entrypoints.cli.chat", "talk to a running server"),
    "complete": ("vllm.entrypoints.cli.complete", "let a running server go on a text"),
    "bench": ("vllm.entrypoints.cli.bench", "measure a server or the engine"),
    "speculator": ("vllm.entrypoints.cli.speculator", "make or judge a drafter"),
    "collect-env": ("vllm.entrypoints.cli.collect_env", "describe this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, and return its exit code.

    0: done; 1: it could not be done; 2: the command line is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command("vllm", COMMANDS, arguments)


def run_command(
    prog: str, commands: dict[str, tuple[str, str]], argv: Sequence[str]
) -> int:
    """Run one of `commands`, or print what there is.

    Args:
        prog: the command so far, for messages.
        commands: name -> (module with a `run(argv) -> int`, what it does).
        argv: what follows `prog`.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview(prog, commands))
        return 0 if argv else 2
    if argv[0] in ("-v", "--version"):
        print(__version__)
        return 0
    name = argv[0]
    if name not in commands:
        return _fail(f"unknown command {name!r}{did_you_mean(name, commands)}", 2)
    try:
        envs.validate()
    except ValueError as error:
        return _fail(str(error), 2)
    run: Callable[[Sequence[str]], int] = import_module(commands[name][0]).run
    try:
        code = run(argv[1:])
        sys.stdout.flush()
        return code
    except VLLMValidationError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        # Nobody reads on, as in `vllm complete | head`. What is left in
        # the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (EngineDeadError, UnsupportedError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _overview(prog: str, commands: dict[str, tuple[str, str]]) -> str:
    lines = [f"usage: {prog} <command> [arguments]", ""]
    lines += [f"  {name:12} {text}" for name, (_, text) in commands.items()]
    return "\n".join([*lines, "", f"`{prog} <command> --help` says more."])


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
