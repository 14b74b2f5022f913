"""Products with quantised weights beside float32 ones, and beside the machine's limits.

    .venv/bin/python benchmarks/quantized_linear.py --quick

Weights are as many as do not fit in the caches, so that every product reads them from
memory, as a step does. The limits are measured in the same run, by a program that is
compiled for it: bytes that are read from memory, and multiply-adds of bytes that are in
registers. Rounds of the kinds are interleaved and the figures are medians.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vllm._cpu_ops_native import ISAS, NativeOps, load_native_ops

REPOSITORY = Path(__file__).resolve().parent.parent
# N of a layer and of the output layer of the embedded model; K is the same.
SIZE = 576
LAYER, HEAD = 1536, 49152
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("float32", "Q4_0", "Q4_1", "Q8_0", "int8")
WEIGHT_BYTES = 128 << 20
READ_BYTES = 512 << 20
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "base": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512,
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
}


class Limits:
    """The machine's own speeds, by the instructions of one build."""

    def __init__(self, isa: str) -> None:
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            raise SystemExit("the limits need a C++ compiler")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            flags = ("-O3", "-std=c++20", "-shared", "-fPIC")
            source = REPOSITORY / "benchmarks" / "machine_limits.cpp"
            include = f"-I{REPOSITORY / 'csrc' / 'cpu'}"
            command = [compiler, *flags, *ISA_FLAGS[isa], include, source]
            subprocess.run([*command, "-o", library], check=True)
            self._c = ctypes.CDLL(str(library))

    def bytes_per_s(self) -> float:
        """Return the best rate at which memory is read."""
        num_pieces = ctypes.c_int64(READ_BYTES >> 20)
        self._c.allocate_memory.restype = ctypes.c_void_p
        data = ctypes.c_void_p(self._c.allocate_memory(num_pieces))
        seconds = best_s(lambda: self._c.read_memory(data, num_pieces), 8)
        self._c.free_memory(data)
        return READ_BYTES / seconds

    def products_per_s(self) -> float:
        """Return the best rate of multiply-adds of bytes."""
        num_pieces, num_rounds = 4 * torch.get_num_threads(), 500
        arguments = ctypes.c_int64(num_pieces), ctypes.c_int64(num_rounds)
        seconds = best_s(lambda: self._c.multiply_bytes(*arguments), 8)
        return num_pieces * num_rounds * 1024 * 64 / seconds


def best_s(call: Callable[[], object], num_rounds: int) -> float:
    """Return the shortest time of a call."""
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def make_product(
    ops: NativeOps, kind: str, num_columns: int, num_weights: int
) -> tuple[Callable[[torch.Tensor], object], int]:
    """Return what multiplies by all weights of a kind, and the bytes of one."""
    if kind == "float32":
        dense = [
            ops.pack_weight(torch.randn(num_columns, SIZE)) for _ in range(num_weights)
        ]
        return lambda x: [ops.packed_linear(x, w, num_columns, None) for w in dense], (
            dense[0].numel() * 4
        )
    packed = [random_weight(ops, kind, num_columns) for _ in range(num_weights)]
    return (
        lambda x: [ops.quantized_linear(x, w, kind, num_columns, None) for w in packed]
    ), packed[0].numel()


def random_weight(ops: NativeOps, kind: str, num_columns: int) -> torch.Tensor:
    """Return a packed weight of random values and scales of 1/16."""
    if kind == "int8":
        return ops.pack_int8(torch.randn(num_columns, SIZE))
    shape = (num_columns, SIZE // 32, BLOCK_BYTES[kind])
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    for start in range(0, 4 if kind == "Q4_1" else 2, 2):
        blocks[..., start : start + 2] = torch.tensor([0, 0x2C], dtype=torch.uint8)
    return ops.pack_blocks(blocks.flatten(1), kind, SIZE)


def measure(
    products: dict[str, Callable[[torch.Tensor], object]], x: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Return the median time of each product in seconds."""
    times: dict[str, list[float]] = {kind: [] for kind in products}
    for _ in range(rounds + 1):
        for kind, product in products.items():
            start = time.perf_counter()
            product(x)
            times[kind].append(time.perf_counter() - start)
    # The first round warms up.
    return {kind: statistics.median(values[1:]) for kind, values in times.items()}


def bench_shape(
    ops: NativeOps, num_columns: int, rounds: int, limits: tuple[float, float]
) -> None:
    """Print a line a kind and number of rows."""
    products, num_bytes, num_weights = {}, {}, {}
    for kind in KINDS:
        bits = {"float32": 32, "Q4_0": 4.5, "Q4_1": 5}.get(kind, 8.5)
        count = round(WEIGHT_BYTES / (SIZE * num_columns * bits / 8))
        num_weights[kind] = max(2, count)
        products[kind], num_bytes[kind] = make_product(
            ops, kind, num_columns, num_weights[kind]
        )
    for num_rows in NUM_ROWS:
        times = measure(products, torch.randn(num_rows, SIZE), rounds)
        for kind, total_s in times.items():
            seconds = total_s / num_weights[kind]
            rate = num_bytes[kind] / seconds
            multiplied = num_rows * SIZE * num_columns / seconds
            plain = times["float32"] / num_weights["float32"]
            print(
                f"{SIZE}x{num_columns} rows {num_rows:2d} {kind:8s}"
                f"{seconds * 1e6:9.0f} us  {rate / 1e9:5.1f} GB/s"
                f" ({rate / limits[0]:4.0%})  {multiplied / 1e9:6.1f} G/s"
                f" ({multiplied / limits[1]:4.0%})  {plain / seconds:5.2f}x float32",
                flush=True,
            )


def main() -> None:
    """Print the limits and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=list(ISAS), help="the best by default")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isas = [args.isa] if args.isa else list(reversed(ISAS))
    found = {isa: load_native_ops(isa) for isa in isas}
    isa, ops = next(((i, o) for i, o in found.items() if o is not None), (None, None))
    if isa is None or ops is None:
        raise SystemExit("the operators are not built, or do not run here")
    machine = Limits(isa)
    limits = machine.bytes_per_s(), machine.products_per_s()
    print(
        f"{isa}, {args.threads} threads: memory {limits[0] / 1e9:.1f} GB/s, bytes "
        f"{limits[1] / 1e9:.0f} G multiply-adds/s",
        flush=True,
    )
    for num_columns in (LAYER, HEAD):
        bench_shape(ops, num_columns, 5 if args.quick else 25, limits)


if __name__ == "__main__":
    main()
