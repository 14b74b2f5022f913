import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from tests.v1.compile_kernels import KERNELS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PACKAGE = Path(vllm.__file__).parent / "v1"


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="triton brings ptxas for x86-64"
)
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), "80"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_list_of_kernels_is_complete():
    found = {
        ".".join([*path.relative_to(PACKAGE).with_suffix("").parts, name])
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found == set(KERNELS)
