"""What an sdist and a wheel take along beside the modules."""

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


def test_a_drafter_is_part_of_the_package(tmp_path: Path):
    tree, wheel = tmp_path / "tree", tmp_path / "wheel"
    (tree / DRAFTER).mkdir(parents=True)
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "vllm" / name, tree / "vllm")
    for name in FILES:
        (tree / DRAFTER / name).touch()
    command = [sys.executable, "setup.py", "--quiet"]
    command += ["sdist", "--formats=tar", "build_py", f"--build-lib={wheel}"]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    with tarfile.open(next((tree / "dist").iterdir())) as archive:
        packed = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    for name in FILES:
        assert (wheel / DRAFTER / name).is_file()
        assert DRAFTER / name in packed
