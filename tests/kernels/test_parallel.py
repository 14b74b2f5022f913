import os
import shutil
import subprocess
from pathlib import Path

import pytest

NUM_JOBS = 1_000_000
SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_piece_of_a_job_is_run_once_however_late_a_helper_wakes_up(tmp_path):
    program = tmp_path / "stress"
    source = Path(__file__).with_name("pool_stress.cpp")
    flags = ["-O2", "-std=c++20", "-fopenmp", "-pthread", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *flags, source, "-o", program], check=True)
    done = subprocess.run(
        [program, str(NUM_JOBS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0"
