"""The embedded model's output layer: its argmax alone, and behind written logits.

    .venv/bin/python benchmarks/output_layer.py
    .venv/bin/python benchmarks/output_layer.py --logprobs 5

A step of greedy requests needs no more than the argmax, and what log-probabilities are
made of where they are asked for. Rounds of both are interleaved, in an order that
alternates, and the figures are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from vllm import EngineArgs
from vllm.model_executor.model_loader import load_model
from vllm.v1.worker.gpu.sample.gumbel import greedy_argmax
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores, listed_scores
from vllm.v1.worker.gpu.sample.output_rows import OutputRows

CPU = torch.device("cpu")
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)


@torch.inference_mode()
def measure(
    calls: tuple[Callable[[], object], Callable[[], object]], num_rounds: int
) -> tuple[float, float, float]:
    """Return the median of either call in us, and that of their ratio in a round."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_idx in range(num_rounds + 2):
        for place in (round_idx % 2, 1 - round_idx % 2):
            start = time.perf_counter()
            calls[place]()
            times[place].append((time.perf_counter() - start) * 1e6)
    # The first rounds warm up.
    first, second = times[0][2:], times[1][2:]
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return (
        statistics.median(first),
        statistics.median(second),
        statistics.median(ratios),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", help="of the weights; the default's if none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--logprobs", type=int, help="candidates, at most 64")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {} if args.quantization is None else {"quantization": args.quantization}
    config = EngineArgs(device="cpu", **options).create_engine_config()
    model = load_model(config, CPU)
    size = config.model_config.hf_config.hidden_size
    print(f"{args.threads} threads, {config.model_config.quantization}")
    for num_rows in args.num_rows:
        hidden_states = torch.randn(num_rows, size)

        def written(hidden_states: torch.Tensor = hidden_states) -> torch.Tensor:
            outputs = OutputRows(model, hidden_states)
            token_ids = greedy_argmax(outputs.logits)
            if args.logprobs is None:
                return token_ids
            scores = compute_topk_scores(outputs.logits, args.logprobs, token_ids)
            return scores.logprobs

        def alone(hidden_states: torch.Tensor = hidden_states) -> torch.Tensor:
            outputs = OutputRows(model, hidden_states)
            if args.logprobs is None:
                return outputs.argmax()
            count = max(args.logprobs, 1)
            listed = outputs.maybe_statistics(outputs.all_rows, count, outputs.no_rows)
            assert listed is not None, "the compiled operators are needed"
            return listed_scores(listed, args.logprobs).logprobs

        assert torch.equal(written(), alone()), "other results"
        before, after, ratio = measure((written, alone), args.rounds)
        print(
            f"rows {num_rows:2d}  written {before:8.0f} us  alone {after:8.0f} us"
            f"  {ratio:5.3f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
