"""Share of a step that is no model: scheduling, inputs, sampling, outputs.

    .venv/bin/python benchmarks/host_overhead.py --num-requests 1 --adaptive

Requests run on the embedded model, in process. Once all of them decode, the parts of
each step are timed. What is neither the target, its output layer nor the drafter counts
as host work, also what no named part covers.
"""

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.benchmarks.datasets import random_requests
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

# What is timed: where it is, its name there, and the part of the step it belongs to.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "scheduling"),
    (Scheduler, "update_from_output", "scheduling"),
    (model_runner.GPUModelRunner, "_update_rows", "input preparation"),
    (model_runner.GPUModelRunner, "_prepare_inputs", "input preparation"),
    (model_runner, "build_attn_metadata", "input preparation"),
    (OutputProcessor, "process_outputs", "output handling"),
    (model_runner.GPUModelRunner, "_forward", "forward pass"),
    (DenseCausalLM, "compute_logits", "output layer"),
    (DenseCausalLM, "maybe_compute_argmax", "output layer"),
    (DenseCausalLM, "maybe_compute_statistics", "output layer"),
    (model_runner.GPUModelRunner, "_sample", "sampling"),
    (DSparkSpeculator, "propose", "drafting"),
    (DSparkSpeculator, "write_context", "drafting"),
)
# Of ordinary words in the embedded model's vocabulary; 0 to 16 are special.
TOKEN_IDS = list(range(1000, 40000))
MODEL_PARTS = ("forward pass", "output layer", "drafting")


class Stopwatch:
    """Adds up the time of each part; a part inside another is taken from the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time every call of `owner.name` as `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed_s = time.perf_counter() - start_s
                self.seconds[part] += elapsed_s - self._inner_s.pop()
                self._inner_s[-1] += elapsed_s

        setattr(owner, name, timed)


def measure(
    num_requests: int,
    num_steps: int,
    input_len: int,
    temperature: float,
    speculation: dict[str, Any],
) -> dict[str, Any]:
    """Return the medians of the parts of a step, in ms, and the share of host work."""
    watch = Stopwatch()
    for owner, name, part in PARTS:
        watch.wrap(owner, name, part)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            max_model_len=2048,
            max_num_seqs=num_requests,
            use_tqdm_on_load=False,
            **speculation,
        )
    )
    params = SamplingParams(
        temperature=temperature, top_p=0.95, max_tokens=1024, ignore_eos=True
    )
    requests = random_requests(num_requests, input_len, 1, 0.0, TOKEN_IDS, seed=0)
    for index, request in enumerate(requests):
        prompt = {"prompt_token_ids": request.prompt}
        engine.add_request(str(index), prompt, params)
    _prefill(engine, num_requests)

    steps: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        watch.seconds.clear()
        start_s = time.perf_counter()
        engine.step()
        elapsed_s = time.perf_counter() - start_s
        for _, _, part in PARTS:
            watch.seconds.setdefault(part, 0.0)
        for part, seconds in watch.seconds.items():
            steps[part].append(seconds * 1e3)
        steps["step"].append(elapsed_s * 1e3)
        model_s = sum(watch.seconds[part] for part in MODEL_PARTS)
        steps["host"].append((elapsed_s - model_s) * 1e3)
    medians = {part: statistics.median(values) for part, values in steps.items()}
    # Of all steps: under speculation they are of several kinds.
    return {"ms": medians, "host_share": sum(steps["host"]) / sum(steps["step"])}


def _prefill(engine: LLMEngine, num_requests: int) -> None:
    """Step until every request has its first token."""
    answered: set[str] = set()
    while len(answered) < num_requests:
        answered |= {output.request_id for output in engine.step()}
    # The last of the prefill's effects, such as first touches of memory.
    for _ in range(8):
        engine.step()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--adaptive", action="store_true", help="with the embedded drafter"
    )
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    figures = measure(
        args.num_requests,
        args.num_steps,
        args.input_len,
        args.temperature,
        {} if args.adaptive else {"speculative_config": None},
    )
    print(f"{args.num_requests} requests, median of {args.num_steps} decode steps\n")
    for part, value_ms in figures["ms"].items():
        print(f"{part:20} {value_ms:8.3f} ms")
    print(f"\nhost work is {figures['host_share']:.1%} of the step")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
