"""`vllm speculator`: make a drafter for a model, calibrate it, judge it."""

from collections.abc import Sequence

from vllm.entrypoints.cli.main import run_command

SPECULATOR_COMMANDS = {
    "train": ("vllm.entrypoints.cli.speculator_train", "train a drafter for a model"),
    "calibrate": (
        "vllm.entrypoints.cli.speculator_calibrate",
        "make a drafter's confidences true",
    ),
    "evaluate": (
        "vllm.entrypoints.cli.speculator_evaluate",
        "measure how much of a drafter's text is accepted",
    ),
}


def run(argv: Sequence[str]) -> int:
    """Run one of the commands; return the exit code."""
    return run_command("vllm speculator", SPECULATOR_COMMANDS, argv)
