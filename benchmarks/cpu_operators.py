"""The compiled CPU operators beside torch's own, in one run.

    .venv/bin/python benchmarks/cpu_operators.py --threads 1

Rounds of the implementations are interleaved and the figures are medians. Weights and
caches are as many as a model has, so that a decode reads them from memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm import _cpu_ops_torch
from vllm._cpu_ops_native import NativeOps, load_native_ops

# K and N of the embedded model's layers and its output layer.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
VOCAB_SIZE = 49152
WEIGHT_BYTES = 100 << 20
NUM_LAYERS = 30


def median_ms(
    calls: dict[str, Callable[[], object]], num_rounds: int
) -> dict[str, float]:
    """Return the median time of each call, the rounds interleaved."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    # The first round warms the caches up.
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def report(name: str, times: dict[str, float]) -> None:
    torch_ms = times["torch"]
    ratios = "  ".join(
        f"{build} {ms:9.3f} ms ({torch_ms / ms:5.2f}x)"
        for build, ms in times.items()
        if build != "torch"
    )
    print(f"{name:<34} torch {torch_ms:9.3f} ms  {ratios}", flush=True)


def bench_linear(
    builds: dict[str, NativeOps], num_rows: int, size: int, num_columns: int
) -> None:
    num_weights = 2
    if num_rows <= 8:
        num_weights = max(1, min(40, WEIGHT_BYTES // (size * num_columns * 4)))
    weights = [torch.randn(num_columns, size) for _ in range(num_weights)]
    packed = [next(iter(builds.values())).pack_weight(weight) for weight in weights]
    x = torch.randn(num_rows, size)

    def run(ops: NativeOps) -> Callable[[], object]:
        return lambda: [ops.packed_linear(x, w, num_columns, None) for w in packed]

    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: [F.linear(x, w) for w in weights]
    }
    calls |= {name: run(ops) for name, ops in builds.items()}
    flops = 2 * num_rows * size * num_columns * num_weights
    num_rounds = max(5, min(40, int(4e9 / flops)))
    times = median_ms(calls, num_rounds)
    report(
        f"linear M={num_rows} K={size} N={num_columns}",
        {name: ms / num_weights for name, ms in times.items()},
    )


def bench_attention(
    builds: dict[str, NativeOps], num_reqs: int, query_len: int, seq_len: int
) -> None:
    num_blocks = num_reqs * seq_len // 16
    caches = {
        dtype: [
            torch.randn(num_blocks, 2, 3, 16, 64).to(dtype) for _ in range(NUM_LAYERS)
        ]
        for dtype in (torch.float32, torch.float16)
    }
    query = torch.randn(num_reqs * query_len, 9, 64)
    out = torch.empty_like(query)
    table = torch.arange(num_blocks, dtype=torch.int32).view(num_reqs, -1)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
    lengths = torch.full((num_reqs,), seq_len, dtype=torch.int32)
    dense = [torch.randn(num_reqs, 9, seq_len, 64) for _ in range(NUM_LAYERS)]
    dense_query = torch.randn(num_reqs, 9, query_len, 64)

    def run(ops: NativeOps, dtype: torch.dtype) -> Callable[[], object]:
        return lambda: [
            ops.paged_attention(
                query, kv_cache, table, starts, lengths, 0.125, out, True
            )
            for kv_cache in caches[dtype]
        ]

    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: [
            F.scaled_dot_product_attention(
                dense_query, layer, layer, is_causal=query_len == seq_len
            )
            for layer in dense
        ]
    }
    for name, ops in builds.items():
        calls[name] = run(ops, torch.float32)
        calls[f"{name}, half cache"] = run(ops, torch.float16)
    times = median_ms(calls, 15)
    report(
        f"attention {num_reqs}x{query_len} of {seq_len}",
        {name: ms / NUM_LAYERS for name, ms in times.items()},
    )


def bench_sampling(builds: dict[str, NativeOps]) -> None:
    logits = torch.randn(1, VOCAB_SIZE) * 3
    keys = torch.tensor([5])
    top_k, top_p = torch.tensor([50], dtype=torch.int32), torch.tensor([0.9])
    cases: dict[str, Callable[[NativeOps], object]] = {
        "gumbel_argmax": lambda ops: ops.gumbel_argmax(logits, keys, None),
        "top_k_top_p": lambda ops: ops.top_k_top_p(logits.clone(), top_k, top_p),
        "logprob_stats": lambda ops: ops.logprob_stats(logits, keys),
    }
    implementations = {"torch": _cpu_ops_torch, **builds}
    for name, case in cases.items():
        calls: dict[str, Callable[[], object]] = {
            build: lambda case=case, ops=ops: case(ops)
            for build, ops in implementations.items()
        }
        report(f"{name}, a row of {VOCAB_SIZE}", median_ms(calls, 15))


def main() -> None:
    """Print one line an operator and shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-rows", type=int, nargs="+", default=[1, 8, 32, 512])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {name: load_native_ops(name) for name in ("base", "avx512")}
    builds = {name: ops for name, ops in found.items() if ops is not None}
    if not builds:
        parser.error("the operators are not built: pip install -e .")
    for num_rows in args.num_rows:
        for size, num_columns in SHAPES:
            if num_rows <= 32 or num_columns < VOCAB_SIZE:
                bench_linear(builds, num_rows, size, num_columns)
    for num_reqs, query_len, seq_len in (
        (1, 1, 208),
        (8, 1, 208),
        (32, 1, 208),
        (1, 512, 512),
    ):
        bench_attention(builds, num_reqs, query_len, seq_len)
    bench_sampling(builds)


if __name__ == "__main__":
    main()
