"""Build the C++ operators with CMake; everything else is in pyproject.toml.

A machine without CMake or a C++20 compiler gets a warning and a package that runs the
torch twins instead.
"""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
X86_BUILDS = ("vllm._C_cpu_portable", "vllm._C_cpu_avx512", "vllm._C_cpu_avx512_vnni")
IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}


class CMakeExtension(Extension):
    """A library that CMake builds from the target of the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[], optional=True)


class CMakeBuild(build_ext):
    """Run CMake for each extension; a failure is a warning."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without Python's ABI tag: it does not use Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extensions(self) -> None:
        """Build all targets side by side, then each for itself."""
        # What fails here fails again below, where it is a warning about its extension.
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self._run_cmake(*map(target_of, self.extensions))
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """Put the libraries into the tree; old ones of their names do not stay."""
        for ext in self.extensions:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        """Put the library of `ext` where it belongs, or nothing."""
        library = Path(self.get_ext_fullpath(ext.name))
        # An old one would be loaded. The new one is a new file, never the old one
        # changed: a running server may have it mapped.
        library.unlink(missing_ok=True)
        try:
            self._install_library(ext, library)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(
                f"{ext.name} was not built ({error}): the next best build, or the "
                "slower torch operators, will run in its place. Install a C++20 "
                "compiler and CMake 3.18 or newer, then reinstall."
            )

    def _install_library(self, ext: Extension, library: Path) -> None:
        target = target_of(ext)
        build_dir = self._run_cmake(target)
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_dir / f"{target}.so", library)

    def _run_cmake(self, *targets: str) -> Path:
        """Bring targets up to date; return the folder they are in."""
        cmake = find_cmake()
        build_dir = (Path(self.build_temp) / "cmake").resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [cmake, "-S", str(ROOT), "-B", str(build_dir)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        # Without a number make starts every job at once.
        parallel = ["--parallel", str(num_processors())]
        subprocess.run(
            [cmake, "--build", str(build_dir), *parallel, "--target", *targets],
            check=True,
        )
        return build_dir


def num_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def target_of(ext: Extension) -> str:
    """Return the name of the target, and of the file, that CMake builds for `ext`."""
    return str(ext.name.rpartition(".")[2])


def find_cmake() -> str:
    """Return CMake's path: the environment's own first, then the system's.

    Raises:
        FileNotFoundError: there is none.
    """
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise FileNotFoundError("cmake is not installed")
    return cmake


setup(
    ext_modules=[
        CMakeExtension("vllm._C_cpu"),
        *(CMakeExtension(name) for name in (X86_BUILDS if IS_X86 else ())),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
