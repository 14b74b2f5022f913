"""The implementations that a test of the CPU operators runs over."""

from types import ModuleType

import pytest

from vllm import _cpu_ops_torch
from vllm._cpu_ops_native import NativeOps, load_native_ops

BASE = load_native_ops("base")
AVX512 = load_native_ops("avx512")

Ops = NativeOps | ModuleType


def _native(ops: NativeOps | None, name: str) -> object:
    skip = pytest.mark.skipif(ops is None, reason=f"no {name} build runs here")
    return pytest.param(ops, id=name, marks=skip)


NATIVE = [_native(BASE, "base"), _native(AVX512, "avx512")]

native_ops = pytest.mark.parametrize("ops", NATIVE)
all_ops = pytest.mark.parametrize(
    "ops", [*NATIVE, pytest.param(_cpu_ops_torch, id="torch")]
)
both_builds = pytest.mark.skipif(AVX512 is None, reason="one build runs here")
