"""Tokens per second on the embedded model, beside transformers in the same run.

    .venv/bin/python benchmarks/compare_transformers.py

Each engine lives in a process of its own; the rounds of the settings are interleaved,
so that what else the machine does meets all of them; the figures are medians. Both
compute in float32 from the same GGUF file, greedily, and every answer has its full
length.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import REPOSITORY, Worker, answer_orders

# Engine and number of concurrent requests.
SETTINGS = (("transformers", 1), ("vllm", 1), ("vllm", 8), ("vllm", 32))
# Ids of ordinary words in the embedded model's vocabulary; 0 to 16 are special.
TOKEN_IDS = range(1000, 40000)


def draw_prompts(seed: int, num_prompts: int, input_len: int) -> list[list[int]]:
    """Return prompts that no other seed returns."""
    rng = random.Random(seed)
    return [rng.choices(TOKEN_IDS, k=input_len) for _ in range(num_prompts)]


class VllmEngine:
    """The engine of this repository, in process."""

    def __init__(self) -> None:
        from vllm import LLM

        # Room for the largest batch and not more: an unused pool would fill with the
        # cached prompts of earlier rounds and be counted as peak memory.
        self._llm = LLM(
            max_model_len=2048,
            kv_cache_memory_bytes=512 * 2**20,
            use_tqdm_on_load=False,
            # transformers has float32 weights, and no drafter here either.
            quantization="none",
            speculative_config=None,
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """Answer the prompts together; return the number of tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class TransformersEngine:
    """Hugging Face transformers with its own cache, one request at a time."""

    def __init__(self) -> None:
        sys.path.insert(0, str(REPOSITORY))
        from tests.model_executor.hf_reference import llama_from_gguf
        from vllm.transformers_utils.model_files import resolve_model_path

        self._model = llama_from_gguf(resolve_model_path(None))

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """Answer the one prompt; return the number of tokens."""
        import torch

        input_ids = torch.tensor(prompts)
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=output_len,
            min_new_tokens=output_len,
        )
        return int(output.numel()) - int(input_ids.numel())


ENGINES = {"vllm": VllmEngine, "transformers": TransformersEngine}


def make_engine(name: str) -> Callable[..., dict[str, Any]]:
    """Start an engine, and return what answers an order of prompts."""
    engine = ENGINES[name]()

    def answer(
        seed: int, num_prompts: int, input_len: int, output_len: int
    ) -> dict[str, Any]:
        prompts = draw_prompts(seed, num_prompts, input_len)
        start_s = time.perf_counter()
        num_tokens = engine.generate(prompts, output_len)
        elapsed_s = time.perf_counter() - start_s
        return {
            "tokens_per_s": num_tokens / elapsed_s,
            "peak_memory_mib": _peak_memory_mib(),
        }

    return answer


def _peak_memory_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def measure(rounds: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Return the medians, the ratios and the peak memory of each engine."""
    workers = {name: Worker(__file__, name) for name in ENGINES}
    rates: dict[tuple[str, int], list[float]] = {setting: [] for setting in SETTINGS}
    memory: dict[str, float] = {}
    # Round 0 warms up and is not counted.
    for round_idx in range(rounds + 1):
        for engine, num_prompts in SETTINGS:
            figures = workers[engine].order(
                seed=round_idx * 1000 + num_prompts,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
            )
            memory[engine] = figures["peak_memory_mib"]
            if round_idx:
                rates[engine, num_prompts].append(figures["tokens_per_s"])
    for worker in workers.values():
        worker.close()
    medians = {setting: statistics.median(values) for setting, values in rates.items()}
    return {
        "tokens_per_s": {f"{name} x{n}": rate for (name, n), rate in medians.items()},
        "ratio_to_transformers": medians["vllm", 1] / medians["transformers", 1],
        "ratio_8_to_1": medians["vllm", 8] / medians["vllm", 1],
        "ratio_32_to_1": medians["vllm", 32] / medians["vllm", 1],
        "peak_memory_mib": memory,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens an answer")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        answer_orders(lambda: make_engine(args.worker))
        return
    figures = measure(args.rounds, args.input_len, args.output_len)
    print(f"median of {args.rounds} rounds, prompts of {args.input_len} tokens,")
    print(f"answers of {args.output_len} tokens, float32, greedy\n")
    for setting, rate in figures["tokens_per_s"].items():
        print(f"{setting:20} {rate:9.1f} tokens/s")
    print(f"\nvllm x1 / transformers x1   {figures['ratio_to_transformers']:6.2f}")
    print(f"vllm x8 / vllm x1           {figures['ratio_8_to_1']:6.2f}")
    print(f"vllm x32 / vllm x1          {figures['ratio_32_to_1']:6.2f}\n")
    for engine, mib in figures["peak_memory_mib"].items():
        print(f"peak memory, {engine:14} {mib:8.0f} MiB")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
