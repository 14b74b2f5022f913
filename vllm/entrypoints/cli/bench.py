"""`vllm bench`: the benchmarks, by name."""

from collections.abc import Sequence

from vllm.entrypoints.cli.main import run_command

BENCHMARKS = {
    "serve": ("vllm.benchmarks.serve", "latency and throughput of a running server"),
    "throughput": ("vllm.benchmarks.throughput", "tokens per second, offline"),
    "latency": ("vllm.benchmarks.latency", "time of one batch, offline"),
    "sweep": ("vllm.benchmarks.sweep", "speculative decoding at rising load, offline"),
}


def run(argv: Sequence[str]) -> int:
    """Run one benchmark; return the exit code."""
    return run_command("vllm bench", BENCHMARKS, argv)
