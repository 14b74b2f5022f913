"""The benchmark of rounding: a run on the embedded model and a short text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from tests.markers import needs_cpu_ops

SCRIPT = Path(vllm.__file__).parent.parent / "benchmarks" / "quantization_error.py"


@needs_cpu_ops
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16"])
def test_it_measures_the_error_of_a_text(tmp_path: Path, kv_cache_dtype: str) -> None:
    text = tmp_path / "sea.txt"
    text.write_text("The sea is everything. It covers seven tenths of the globe. " * 4)
    flags = ["--text", str(text), "--quantization", "gguf"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--kv-cache-dtype", kv_cache_dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"gguf, sea\.txt, .*?([\d.]+) ?%", done.stdout)
    assert found is not None, done.stdout
    # Of these weights; others would show.
    assert 0 < float(found[1]) < 8
