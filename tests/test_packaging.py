"""What an sdist and a wheel take along beside the modules."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import vllm
from vllm.transformers_utils.model_files import embedded_drafter_folder

ROOT = Path(vllm.__file__).parent.parent
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
DRAFTER = Path(embedded_drafter_folder()).relative_to(ROOT)
FILES = ("config.json", "model.safetensors")


def make_tree(tree: Path) -> None:
    (tree / DRAFTER).mkdir(parents=True)
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "vllm" / name, tree / "vllm")
    for name in FILES:
        (tree / DRAFTER / name).touch()


def run_setup(tree: Path, *arguments: str) -> None:
    """Run commands of setup.py where nothing can be compiled."""
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=tree,
        check=True,
        capture_output=True,
        env={**os.environ, "CXX": "/nonexistent"},
    )


def packed_files(tree: Path) -> set[Path]:
    """Return what the sdist in `tree` has."""
    with tarfile.open(next((tree / "dist").iterdir())) as archive:
        return {Path(*Path(name).parts[1:]) for name in archive.getnames()}


def test_a_drafter_is_part_of_the_package(tmp_path: Path):
    tree, wheel = tmp_path / "tree", tmp_path / "wheel"
    make_tree(tree)
    run_setup(tree, "sdist", "--formats=tar", "build_py", f"--build-lib={wheel}")
    packed = packed_files(tree)
    for name in FILES:
        assert (wheel / DRAFTER / name).is_file()
        assert DRAFTER / name in packed


def test_a_library_that_was_not_built_now_is_nowhere(tmp_path: Path):
    tree, wheel = tmp_path / "tree", tmp_path / "wheel"
    make_tree(tree)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    # Of an earlier build, in both places where one puts them.
    stale = [folder / "vllm" / "_C_cpu.so" for folder in (tree, wheel)]
    for library in stale:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
    run_setup(tree, "sdist", "--formats=tar", "build", f"--build-lib={wheel}")
    assert not [name for name in packed_files(tree) if name.suffix == ".so"]
    assert not list(wheel.rglob("*.so"))
    run_setup(tree, "build_ext", "--inplace")
    assert not list((tree / "vllm").glob("*.so"))
