import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.v1.worker.gpu.sample.compile_kernels import KERNELS
from vllm.v1.worker.gpu.sample import sampler

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[4]


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
    sources = Path(sampler.__file__).parent.glob("*.py")
    found = {
        f"{path.stem}.{name}"
        for path in sources
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found == set(KERNELS)
