"""Tokens per second of one chat: without drafts, with n-grams and with a drafter.

    .venv/bin/python benchmarks/speculative_decoding.py
    .venv/bin/python benchmarks/speculative_decoding.py --drafter DIR --temperature 1

Each setting has an engine in a process of its own. They answer prompt after prompt, one
at a time, in an order that turns from prompt to prompt, so that what else the machine
does meets all of them. A rate is the median over the prompts, and a ratio the median of
the prompts' own ratios. At temperature 0 the three answers to a prompt must be equal,
token by token; the exit code is 1 if they are not.

The accepted length is that of the engine's log: tokens of a step that had drafts, the
one that the model adds included. The acceptance rate is over all verified drafts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from os.path import abspath, exists
from pathlib import Path
from typing import Any

from tqdm import tqdm
from workers import Worker, answer_orders

from vllm.config.model import QUANTIZATIONS
from vllm.exceptions import UnsupportedError, VLLMValidationError
from vllm.speculator_training.prompts import read_prompts

# Written for this benchmark; no drafter was trained on them.
PROMPTS = Path(__file__).with_name("chat_prompts.jsonl")
WARM_UP = [{"role": "user", "content": "Say something about the weather."}]
BASELINE = "off"
SETTINGS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "dspark": {"method": "dspark"},
}
COUNTERS = ("num_drafts", "num_admitted_tokens", "num_accepted_tokens")


def make_engine(
    setting: str, model: str | None, drafter: str | None, quantization: str
) -> Callable[..., dict[str, Any]]:
    """Start the engine of a setting, and return what answers one conversation."""
    from vllm import LLM, SamplingParams

    config = SETTINGS[setting]
    if drafter is not None and setting == "dspark":
        # Drawn drafts, as those of the embedded model.
        config = {"model": drafter, "draft_sample_method": "probabilistic"}
    llm = LLM(
        model,
        quantization=quantization,
        max_num_seqs=1,
        kv_cache_memory_bytes=512 * 2**20,
        speculative_config=config,
        disable_log_stats=False,
        use_tqdm_on_load=False,
    )

    def read_counters() -> dict[str, int]:
        values = {metric.name: metric for metric in llm.get_metrics()}
        return {
            name: getattr(values.get(f"vllm:spec_decode_{name}"), "value", 0)
            for name in COUNTERS
        }

    def answer(
        messages: list[dict[str, str]], max_tokens: int, temperature: float
    ) -> dict[str, Any]:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        before = read_counters()
        start_s = time.perf_counter()
        [output] = llm.chat(messages, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        counts = {name: n - before[name] for name, n in read_counters().items()}
        token_ids = list(output.outputs[0].token_ids)
        return {"token_ids": token_ids, "elapsed_s": elapsed_s, **counts}

    return answer


def measure(
    conversations: list[list[dict[str, str]]],
    workers: dict[str, Worker],
    max_tokens: int,
    temperature: float,
) -> dict[str, list[dict[str, Any]]]:
    """Let every setting answer every conversation; return the answers in order."""
    names = list(workers)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    total = len(conversations) * len(names)
    with tqdm(total=total, desc="Answers", unit="answer") as bar:
        for index, messages in enumerate(conversations):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                answers[name].append(
                    workers[name].order(
                        messages=messages,
                        max_tokens=max_tokens,
                        temperature=temperature,
                    )
                )
                bar.update()
    return answers


def summarise(
    answers: dict[str, list[dict[str, Any]]],
) -> dict[str, dict[str, float | None]]:
    """Return the figures of each setting; None where it had no drafts."""
    rates = {
        name: [len(one["token_ids"]) / one["elapsed_s"] for one in given]
        for name, given in answers.items()
    }
    figures: dict[str, dict[str, float | None]] = {}
    for name, given in answers.items():
        num_drafts, num_verified, num_accepted = (
            sum(one[counter] for one in given) for counter in COUNTERS
        )
        ratios = [
            rate / plain
            for rate, plain in zip(rates[name], rates[BASELINE], strict=True)
        ]
        figures[name] = {
            "tokens_per_s": statistics.median(rates[name]),
            "ratio_to_off": statistics.median(ratios),
            "accepted_length": 1 + num_accepted / num_drafts if num_drafts else None,
            "acceptance_rate": (num_accepted / num_verified if num_verified else None),
        }
    return figures


def find_differences(answers: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a line for each answer that is not that of the baseline."""
    lines = []
    for name, given in answers.items():
        for index, (one, plain) in enumerate(
            zip(given, answers[BASELINE], strict=True)
        ):
            ids, expected = one["token_ids"], plain["token_ids"]
            if ids != expected:
                pairs = zip(ids, expected, strict=False)
                common = next(
                    (at for at, pair in enumerate(pairs) if pair[0] != pair[1]),
                    min(len(ids), len(expected)),
                )
                lines.append(f"prompt {index}: {name} differs at token {common}")
    return lines


def print_table(figures: dict[str, dict[str, float | None]]) -> None:
    """Print one line a setting."""
    print(f"{'':8}{'tokens/s':>10}{'ratio':>8}{'accepted length':>18}{'accepted':>10}")
    for name, values in figures.items():
        length, rate = values["accepted_length"], values["acceptance_rate"]
        print(
            f"{name:8}{values['tokens_per_s']:>10.1f}{values['ratio_to_off']:>8.2f}"
            f"{'-' if length is None else format(length, '.2f'):>18}"
            f"{'-' if rate is None else format(rate, '.1%'):>10}"
        )


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", help="its folder (default: the model's own)")
    parser.add_argument("--model", help="of chats (default: the embedded one)")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="of the weights (default: %(default)s, as `vllm serve`)",
    )
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", choices=tuple(SETTINGS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.num_prompts < 1 or args.max_tokens < 1:
        parser.error("--num-prompts and --max-tokens must be at least 1")
    return args


def main() -> int:
    """Measure and print; return the exit code."""
    args = parse_args()
    if args.worker:
        try:
            answer_orders(
                lambda: make_engine(
                    args.worker, args.model, args.drafter, args.quantization
                )
            )
        except (VLLMValidationError, UnsupportedError) as error:
            raise SystemExit(f"error: {args.worker}: {error}") from None
        return 0
    conversations = read_prompts(str(PROMPTS))[: args.num_prompts]
    passed_on = [
        flag
        for name in ("model", "drafter")
        if (value := getattr(args, name)) is not None
        # The worker runs in a folder of its own.
        for flag in (f"--{name}", abspath(value) if exists(value) else value)
    ]
    passed_on += ["--quantization", args.quantization]
    workers = {}
    for name in SETTINGS:
        workers[name] = Worker(__file__, name, *passed_on)
        # One start after the other: an engine that times its steps needs the machine.
        workers[name].order(messages=WARM_UP, max_tokens=16, temperature=0.0)
    answers = measure(conversations, workers, args.max_tokens, args.temperature)
    for worker in workers.values():
        worker.close()
    figures = summarise(answers)
    num_tokens = sum(len(one["token_ids"]) for one in answers[BASELINE])
    print(
        f"one request at a time, {len(conversations)} chat prompts, {num_tokens} "
        f"tokens, at most {args.max_tokens} an answer, temperature "
        f"{args.temperature:g}, quantization {args.quantization}\n"
    )
    print_table(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if args.temperature > 0:
        return 0
    differences = find_differences(answers)
    print("\n" + ("\n".join(differences) or "All settings gave the same tokens."))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
