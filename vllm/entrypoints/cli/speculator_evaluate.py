"""`vllm speculator evaluate`: the report of any drafter on any prompts."""

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
from vllm.speculator_training.evaluate import evaluate
from vllm.speculator_training.report import format_report
from vllm.speculator_training.settings import DataSettings


def run(argv: Sequence[str]) -> int:
    """Print the report of a drafter; return the exit code."""
    parser = make_parser(
        "evaluate", "Measure how much of a drafter's text is accepted."
    )
    parser.add_argument("--speculator", metavar="DIR", help="folder of the drafter")
    parser.add_argument("--output", metavar="DIR", help="folder for the report, too")
    # Other prompts than those of a training or calibration with the default seed.
    parser.set_defaults(num_prompts=256, seed=2)
    args = parser.parse_args(argv)
    if args.speculator is None:
        parser.error("--speculator DIR is required")
    settings = take_settings(args, DataSettings, DATA_FLAGS)
    folder = existing_folder(args.speculator)
    engine_args, vllm_config = make_config(args)
    with tempfile.TemporaryDirectory() as scratch:
        report = evaluate(
            folder,
            vllm_config,
            lambda: make_answers(engine_args, settings, scratch, args.prompts),
            args.output,
            settings.seed,
        )
    print(format_report(report))
    return 0
