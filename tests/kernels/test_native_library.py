"""How the compiled operators are found, loaded and switched off."""

import subprocess
import sys
from pathlib import Path

from tests.kernels.implementations import BUILDS, native_ops
from tests.markers import needs_cpu_ops
from vllm._cpu_ops_native import maybe_load_native_ops


def test_environment_switches_the_operators_off(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "1")
    assert maybe_load_native_ops() is None


@needs_cpu_ops
def test_environment_picks_the_build(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "0")
    monkeypatch.setenv("VLLM_CPU_ISA", "base")
    ops = maybe_load_native_ops()
    assert ops is not None
    assert ops.library.name == "_C_cpu.so"
    monkeypatch.setenv("VLLM_CPU_ISA", "")
    best = maybe_load_native_ops()
    assert best is not None
    assert best.library == BUILDS[-1].library


@needs_cpu_ops
def test_one_openmp_runtime_is_loaded():
    # In a process of its own: other tests load libraries with runtimes of their own.
    script = """
import torch
from vllm import _custom_ops as ops
assert ops.has_cpu_ops()
x = torch.ones(64, 256)
ops.packed_linear(x, ops.pack_weight(torch.ones(512, 256)), 512)
torch.ones(512, 512) @ torch.ones(512, 512)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
"""
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(output) == 1
    assert Path(output[0]).parent.name == "lib"


@native_ops
def test_library_needs_no_runtime_of_its_own(ops):
    dynamic = ops.library.read_bytes()
    assert b"libgomp.so" not in dynamic
    assert b"libtorch" not in dynamic
