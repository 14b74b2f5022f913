"""What a process does with its memory when it is ready."""

import ctypes
import subprocess
import sys

import pytest

COLLECTOR = """
import gc
from vllm.utils.process_heap import settle_heap

kept = [[] for _ in range(100)]
cycle = []
cycle.append(cycle)
del cycle
settle_heap()
assert not any(kept[0] is alive for alive in gc.get_objects())
assert gc.get_freeze_count() >= 100
assert gc.collect() == 0
"""

FREED = """
import ctypes
from pathlib import Path
from vllm.utils.process_heap import settle_heap

def resident_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    [value] = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(value)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
# Small enough for the heap, of which only the end is given back by itself.
pieces = [libc.malloc(ctypes.c_size_t(65536)) for _ in range(1024)]
for piece in pieces:
    ctypes.memset(piece, 1, 65536)
for piece in pieces[:-1]:
    libc.free(ctypes.c_void_p(piece))
before = resident_kib()
settle_heap()
assert before - resident_kib() > 32 * 1024, (before, resident_kib())
"""


def run_alone(program):
    # In a process of its own: what is frozen here would stay so for all tests.
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_alive_is_looked_at_no_more_and_what_is_not_is_freed():
    run_alone(COLLECTOR)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library"
)
def test_memory_that_was_freed_goes_back_to_the_system():
    run_alone(FREED)
