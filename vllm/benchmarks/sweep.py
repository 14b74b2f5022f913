"""`vllm bench sweep`: without drafts, with fixed numbers, and adaptive, by load."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from vllm.benchmarks.datasets import chat_prompts, file_requests
from vllm.benchmarks.engine_process import EngineProcess
from vllm.benchmarks.offline import engine_parser
from vllm.benchmarks.sweep_report import ADAPTIVE, OFF, SweepReport
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int

# A slot has so many requests one after another.
_REQUESTS_PER_SLOT = 2
_NUM_WARM_UP_REQUESTS = 8
# Of each engine on a CPU, where nothing else is asked for: all of them must fit.
_KV_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class _Scale:
    """How much is measured when nothing is said."""

    concurrency: tuple[int, ...]
    settings: tuple[str, ...]
    rounds: int
    output_len: int
    min_requests: int


_FULL = _Scale(
    concurrency=(1, 2, 4, 8, 16, 32, 64),
    settings=(OFF, "1", "3", "5", "7", ADAPTIVE),
    rounds=3,
    output_len=128,
    # A few requests end too soon for differences of a few percent.
    min_requests=16,
)
_QUICK = _Scale(
    concurrency=(1, 4),
    settings=(OFF, "3", ADAPTIVE),
    rounds=1,
    output_len=16,
    min_requests=8,
)


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm bench sweep`."""
    parser = engine_parser(
        "vllm bench sweep",
        "Measure the engine without drafts, with as many in every step, and with "
        "adaptive verification, while more and more requests run at once.",
    )
    group = parser.add_argument_group("Sweep")
    group.add_argument(
        "--concurrency",
        type=_int_list,
        metavar="N,N",
        help=f"requests at once (default: {_join(_FULL.concurrency)})",
    )
    group.add_argument(
        "--settings",
        type=_setting_list,
        metavar="S,S",
        help=f"{OFF}, numbers of drafts, {ADAPTIVE} (default: {_join(_FULL.settings)})",
    )
    group.add_argument(
        "--rounds",
        type=human_int,
        help=f"over which medians are taken (default: {_FULL.rounds})",
    )
    group.add_argument(
        "--output-len",
        type=human_int,
        help=f"tokens an answer, at most (default: {_FULL.output_len})",
    )
    group.add_argument(
        "--min-requests",
        type=human_int,
        help="of a load, where two for each that runs at once are fewer "
        f"(default: {_FULL.min_requests})",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, help="(default: %(default)s)"
    )
    group.add_argument(
        "--dataset-path",
        help='file of {"prompt": text} lines, user turns; default: built-in ones',
    )
    group.add_argument("--output-json", help="file for the figures")
    group.add_argument("--plot", metavar="FILE", help="picture, such as sweep.png")
    group.add_argument(
        "--quick", action="store_true", help="a small sweep, to see that it runs"
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    _fill_and_check(parser, args)
    try:
        engines = {name: make_engine_args(args, name) for name in args.settings}
    except VLLMValidationError as error:
        parser.error(str(error))
    report = measure(args, engines)
    print(report.format())
    if args.output_json:
        asked = {name: getattr(args, name) for name in ("rounds", *_LOAD_FLAGS)}
        with open(args.output_json, "w", encoding="utf-8") as file:
            json.dump(asked | report.to_json(), file, indent=2)
    if args.plot:
        report.draw(args.plot)
    return 0


_LOAD_FLAGS = ("output_len", "min_requests", "temperature", "dataset_path", "seed")


def make_engine_args(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Return the fields of `EngineArgs` for a setting.

    Raises:
        VLLMValidationError: the flags describe no engine.
    """
    values = asdict(EngineArgs.from_cli_args(args))
    base = values["speculative_config"]
    base = dict(base) if isinstance(base, dict) else {}
    if setting == OFF:
        values["speculative_config"] = None
    elif setting == ADAPTIVE:
        values["speculative_config"] = base | {"enable_adaptive_verification": True}
    else:
        base.pop("cost_table", None)
        values["speculative_config"] = base | {
            "num_speculative_tokens": int(setting),
            "enable_adaptive_verification": False,
        }
    return asdict(EngineArgs(**values))


def measure(
    args: argparse.Namespace, engines: dict[str, dict[str, Any]]
) -> SweepReport:
    """Start the engines, and let them take turns at each load."""
    report = SweepReport(list(engines), list(args.concurrency))
    num_requests = {
        concurrency: max(_REQUESTS_PER_SLOT * concurrency, args.min_requests)
        for concurrency in args.concurrency
    }
    prompts = _read_prompts(args, max(num_requests.values()))
    total = (1 + args.rounds * len(args.concurrency)) * len(engines)
    with ExitStack() as stack, tqdm(total=total, desc="Loads", unit="load") as bar:
        processes = {}
        for setting, engine_args in engines.items():
            bar.set_postfix_str(f"{setting} starts")
            process = EngineProcess(setting, engine_args)
            processes[setting] = stack.enter_context(closing(process))
            _run(process, args, prompts[:_NUM_WARM_UP_REQUESTS], 1, "warm-up")
            bar.update()
        for round_idx in range(args.rounds):
            for number, concurrency in enumerate(args.concurrency):
                first = (round_idx + number) % len(engines)
                turns = report.settings[first:] + report.settings[:first]
                load = prompts[: num_requests[concurrency]]
                for setting in turns:
                    bar.set_postfix_str(f"{setting} x{concurrency}")
                    run_id = f"{round_idx}-{concurrency}"
                    figures = _run(processes[setting], args, load, concurrency, run_id)
                    report.add(concurrency, setting, figures)
                    bar.update()
    return report


def _run(
    process: EngineProcess,
    args: argparse.Namespace,
    prompts: list[str],
    concurrency: int,
    run_id: str,
) -> dict[str, Any]:
    return process.run_load(
        prompts=prompts,
        concurrency=concurrency,
        output_len=args.output_len,
        temperature=args.temperature,
        run_id=run_id,
    )


def _read_prompts(args: argparse.Namespace, num_prompts: int) -> list[str]:
    if args.dataset_path is None:
        return chat_prompts(num_prompts, args.seed)
    requests = file_requests(args.dataset_path, num_prompts, args.output_len)
    return [str(request.prompt) for request in requests]


def _fill_and_check(parser: FlexibleArgumentParser, args: argparse.Namespace) -> None:
    scale = _QUICK if args.quick else _FULL
    for name, value in asdict(scale).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("rounds", "output_len", "min_requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.temperature >= 0:
        parser.error("--temperature must be at least 0")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'vllm[plot]'")
    if args.max_num_seqs is None:
        args.max_num_seqs = max(args.concurrency)
    if args.max_num_seqs < max(args.concurrency):
        parser.error("--max-num-seqs must be at least the largest --concurrency")
    sizes = (args.num_gpu_blocks_override, args.kv_cache_memory_bytes)
    if sizes == (None, None) and args.device != "cuda":
        args.kv_cache_memory_bytes = _KV_CACHE_BYTES


def _int_list(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError("must be different integers such as 1,2,4")
    return numbers


def _setting_list(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    is_known = all(
        name in (OFF, ADAPTIVE) or (name.isdecimal() and int(name) > 0)
        for name in names
    )
    if not is_known or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be different ones of {OFF}, {ADAPTIVE} and numbers of drafts"
        )
    return names


def _join(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
