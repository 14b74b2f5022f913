"""The implementations that a test of the CPU operators runs over."""

from types import ModuleType

import pytest

from vllm import _cpu_ops_torch
from vllm._cpu_ops_native import NativeOps, load_native_ops

PORTABLE = load_native_ops("portable")
BASE = load_native_ops("base")
AVX512 = load_native_ops("avx512")
VNNI = load_native_ops("avx512_vnni")
BUILDS = [ops for ops in (PORTABLE, BASE, AVX512, VNNI) if ops is not None]

Ops = NativeOps | ModuleType


def _native(ops: NativeOps | None, name: str) -> object:
    skip = pytest.mark.skipif(ops is None, reason=f"no {name} build runs here")
    return pytest.param(ops, id=name, marks=skip)


NATIVE = [
    _native(PORTABLE, "portable"),
    _native(BASE, "base"),
    _native(AVX512, "avx512"),
    _native(VNNI, "avx512_vnni"),
]

native_ops = pytest.mark.parametrize("ops", NATIVE)
all_ops = pytest.mark.parametrize(
    "ops", [*NATIVE, pytest.param(_cpu_ops_torch, id="torch")]
)
several_builds = pytest.mark.skipif(len(BUILDS) < 2, reason="one build runs here")
