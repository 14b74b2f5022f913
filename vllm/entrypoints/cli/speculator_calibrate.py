"""`vllm speculator calibrate`: temperatures that make a drafter's confidences true."""

import tempfile
from collections.abc import Sequence

from vllm.entrypoints.cli.speculator_flags import (
    DATA_FLAGS,
    existing_folder,
    make_answers,
    make_config,
    make_parser,
    take_settings,
)
from vllm.speculator_training.evaluate import calibrate
from vllm.speculator_training.report import format_report
from vllm.speculator_training.settings import DataSettings


def run(argv: Sequence[str]) -> int:
    """Calibrate a drafter in its place; return the exit code."""
    parser = make_parser("calibrate", "Make a drafter's confidences true.")
    parser.add_argument("--speculator", metavar="DIR", help="folder of the drafter")
    # Other prompts than those of a training with the default seed.
    parser.set_defaults(num_prompts=256, seed=1)
    args = parser.parse_args(argv)
    if args.speculator is None:
        parser.error("--speculator DIR is required")
    settings = take_settings(args, DataSettings, DATA_FLAGS)
    folder = existing_folder(args.speculator)
    engine_args, vllm_config = make_config(args)
    with tempfile.TemporaryDirectory() as scratch:
        report = calibrate(
            folder,
            vllm_config,
            lambda: make_answers(engine_args, settings, scratch, args.prompts),
            settings.seed,
        )
    print(format_report(report))
    return 0
