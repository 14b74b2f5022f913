"""`vllm bench latency`: how long one batch takes, offline, over several rounds."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm.benchmarks.datasets import WORDS, random_requests
from vllm.benchmarks.offline import engine_parser, make_llm
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int

PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm bench latency`."""
    parser = engine_parser(
        "vllm bench latency", "Answer one batch again and again, offline."
    )
    group = parser.add_argument_group("Load")
    for name, default, text in (
        ("--batch-size", 8, "prompts of the batch"),
        ("--input-len", 32, "tokens a prompt"),
        ("--output-len", 128, "tokens an answer"),
        ("--num-iters-warmup", 2, "rounds before the clock starts"),
        ("--num-iters", 10, "rounds measured"),
    ):
        group.add_argument(
            name, type=human_int, default=default, help=f"{text} (default: {default})"
        )
    group.add_argument("--output-json", help="file for the figures")
    return parser


def measure(
    llm: LLM, prompts: list[Any], output_len: int, num_warmups: int, num_iters: int
) -> list[float]:
    """Answer `prompts` num_iters times, and return the seconds of each round."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    seconds = []
    for round_idx in tqdm(range(num_warmups + num_iters), desc="Rounds"):
        # A round must not find the prompts of the one before.
        llm.reset_prefix_cache()
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if round_idx >= num_warmups:
            seconds.append(time.perf_counter() - start_s)
    return seconds


def run(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if min(args.batch_size, args.input_len, args.output_len, args.num_iters) < 1:
        parser.error("the sizes and --num-iters must be at least 1")
    llm = make_llm(parser, args)
    pool = llm.get_tokenizer().encode(WORDS, add_special_tokens=False)
    requests = random_requests(
        args.batch_size, args.input_len, args.output_len, 0.0, pool, args.seed
    )
    seconds = measure(
        llm,
        [request.prompt for request in requests],
        args.output_len,
        args.num_iters_warmup,
        args.num_iters,
    )
    percentiles = dict(
        zip(PERCENTILES, np.percentile(seconds, PERCENTILES), strict=True)
    )
    print(f"Avg latency: {np.mean(seconds):.4f} seconds")
    for percentile, value in percentiles.items():
        print(f"{percentile}% percentile latency: {value:.4f} seconds")
    if args.output_json:
        figures = {
            "avg_latency": float(np.mean(seconds)),
            "latencies": seconds,
            "percentiles": {
                str(key): float(value) for key, value in percentiles.items()
            },
        }
        with open(args.output_json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
    return 0
