"""`vllm bench throughput`: tokens per second of the offline engine."""

import json
import time
from collections.abc import Sequence

from vllm.benchmarks.datasets import (
    WORDS,
    SampleRequest,
    file_requests,
    random_requests,
)
from vllm.benchmarks.offline import engine_parser, make_llm
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of `vllm bench throughput`."""
    parser = engine_parser(
        "vllm bench throughput", "Answer many prompts at once, offline."
    )
    group = parser.add_argument_group("Load")
    for name, default, text in (
        ("--num-prompts", 64, "requests"),
        ("--input-len", 128, "tokens a prompt"),
        ("--output-len", 128, "tokens an answer"),
    ):
        group.add_argument(
            name, type=human_int, default=default, help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--dataset-path", help='file of {"prompt": text, "output_len": n} lines'
    )
    group.add_argument("--output-json", help="file for the figures")
    return parser


def measure(llm: LLM, requests: list[SampleRequest]) -> dict[str, float]:
    """Answer `requests`, and return the figures by name."""
    params = [
        SamplingParams(max_tokens=one.num_output_tokens, ignore_eos=True)
        for one in requests
    ]
    start_s = time.perf_counter()
    outputs = llm.generate([one.prompt for one in requests], params)
    elapsed_s = time.perf_counter() - start_s
    num_input = sum(len(output.prompt_token_ids or []) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
    }


def run(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if min(args.num_prompts, args.input_len, args.output_len) < 1:
        parser.error("--num-prompts, --input-len and --output-len must be at least 1")
    llm = make_llm(parser, args)
    if args.dataset_path:
        requests = file_requests(args.dataset_path, args.num_prompts, args.output_len)
    else:
        pool = llm.get_tokenizer().encode(WORDS, add_special_tokens=False)
        requests = random_requests(
            args.num_prompts, args.input_len, args.output_len, 0.0, pool, args.seed
        )
    figures = measure(llm, requests)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    if args.output_json:
        with open(args.output_json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
    return 0
