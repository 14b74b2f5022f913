"""How the compiled operators are found, loaded and switched off."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from tests.kernels.implementations import BUILDS, native_ops, several_builds
from tests.kernels.test_parallel import COMPILER, SOURCES
from tests.markers import needs_cpu_ops
from vllm import _cpu_ops_native
from vllm._cpu_ops_native import (
    _LONG,
    _RUNS_EVERYWHERE,
    _SHORT,
    ISAS,
    load_native_ops,
    maybe_load_native_ops,
    read_isa_level,
)

# Where the package could be built, the tests of the operators must not all be skipped.
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

LIBRARIES = {
    "portable": "_C_cpu_portable.so",
    "base": "_C_cpu.so",
    "avx512": "_C_cpu_avx512.so",
    "avx512_vnni": "_C_cpu_avx512_vnni.so",
}


def registered_operators() -> set[str]:
    interface = (SOURCES / "api.h").read_text()
    return set(re.findall(r"^VLLM_API \w+ (vllm_\w+)\(", interface, re.MULTILINE))


def test_python_knows_the_operators_that_the_sources_register():
    # The level is asked of one library, before another is loaded.
    assert registered_operators() == {*_SHORT, *_LONG, "vllm_isa_level"}


# What only a processor or a compiler of one kind has; a hint to either may stand.
INTRINSICS = re.compile(
    r"\b_mm\w*|\b__m(?:128|256|512)\w*|\w*intrin\.h|\b__(?:AVX|SSE|FMA|F16C)\w*"
    r"|arm_neon|__ARM\w*"
)


def test_one_header_knows_the_instruction_sets():
    found = {
        source.name: INTRINSICS.findall(source.read_text())
        for source in SOURCES.iterdir()
    }
    assert found.pop("vec.h")
    assert not {name: names for name, names in found.items() if names}


@needs_compiler
def test_every_build_has_the_operators_that_the_sources_register():
    libraries = sorted(Path(vllm.__file__).parent.glob("_C_cpu*.so"))
    assert libraries, "a machine with a compiler has built the operators"
    for library in libraries:
        exported = ctypes.CDLL(str(library))
        missing = [
            name for name in registered_operators() if not hasattr(exported, name)
        ]
        assert not missing, library.name


@needs_compiler
@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_gets_every_build_that_runs_here_and_no_other(isa, monkeypatch):
    level = read_isa_level(library(LIBRARIES[_RUNS_EVERYWHERE]))
    assert level >= 0, "a machine with a compiler has built the operators"
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "0")
    monkeypatch.setenv("VLLM_CPU_ISA", isa)
    ops = maybe_load_native_ops()
    name = None if ops is None else ops.library.name
    is_built = library(LIBRARIES[isa]).exists()
    assert name == (LIBRARIES[isa] if is_built and level >= ISAS[isa] else None)


@needs_compiler
@pytest.mark.parametrize("level", [-1, *ISAS.values()])
def test_a_build_is_taken_only_where_the_processor_runs_it(level, monkeypatch):
    # Loading a build executes none of its instructions.
    monkeypatch.setattr(_cpu_ops_native, "read_isa_level", lambda library: level)
    built = {isa for isa, name in LIBRARIES.items() if library(name).exists()}
    runnable = [isa for isa, needed in ISAS.items() if needed <= level and isa in built]
    for isa in ISAS:
        assert (load_native_ops(isa) is not None) == (isa in runnable)
    best = load_native_ops()
    expected = LIBRARIES[runnable[-1]] if runnable else None
    assert (None if best is None else best.library.name) == expected


@several_builds
@pytest.mark.parametrize("breakage", ["no library", "of another version"])
def test_a_build_that_cannot_be_loaded_costs_itself_alone(
    breakage, tmp_path, monkeypatch
):
    second, best = BUILDS[-2:]
    for ops in (load_native_ops(_RUNS_EVERYWHERE), second, best):
        shutil.copy(ops.library, tmp_path)
    broken = tmp_path / best.library.name
    if breakage == "no library":
        broken.write_bytes(b"half a file")
    else:
        old = broken.read_bytes().replace(b"vllm_silu_and_mul", b"vllm_silu_and_add")
        broken.unlink()
        broken.write_bytes(old)
    warnings = []
    monkeypatch.setattr(
        _cpu_ops_native.logger, "warning", lambda *args: warnings.append(args)
    )
    ops = load_native_ops(directory=tmp_path)
    assert ops is not None
    assert ops.library == tmp_path / second.library.name
    (warning,) = warnings
    assert broken.name in warning


@needs_cpu_ops
def test_without_the_library_that_tells_the_processor_none_is_loaded(tmp_path):
    shutil.copy(BUILDS[-1].library, tmp_path)
    (tmp_path / LIBRARIES[_RUNS_EVERYWHERE]).unlink(missing_ok=True)
    assert load_native_ops(directory=tmp_path) is None


def library(name: str) -> Path:
    return Path(vllm.__file__).parent / name


def test_environment_switches_the_operators_off(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "1")
    assert maybe_load_native_ops() is None


@needs_cpu_ops
def test_environment_picks_the_best_build(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "0")
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
