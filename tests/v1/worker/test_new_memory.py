"""What the fixture does to new memory, and what it must leave alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
def test_new_memory_holds_garbage(dtype):
    values = torch.empty(3, dtype=dtype)
    expected = {torch.float32: "nan", torch.int32: "2147483641", torch.bool: "True"}
    assert [str(value) for value in values.tolist()] == [expected[dtype]] * 3


def test_a_device_context_decides_where_new_memory_is():
    with torch.device("meta"):
        assert torch.empty(1).is_meta


def test_a_context_that_a_test_opens_first_is_no_other_in_later_tests():
    # In a process of its own, whose first context is opened over the replacements.
    script = """
import pytest, torch
from tests.v1.worker.conftest import fill_new_memory
with pytest.MonkeyPatch.context() as patch:
    fill_new_memory(patch)
    with torch.device("meta"):
        torch.zeros(1)
with torch.device("meta"):
    print(torch.empty(1).is_meta)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"
