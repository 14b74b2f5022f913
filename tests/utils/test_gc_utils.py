import subprocess
import sys

PROGRAM = """
import gc
from vllm.utils.gc_utils import freeze_gc_heap

kept = [[] for _ in range(100)]
cycle = []
cycle.append(cycle)
del cycle
freeze_gc_heap()
assert not any(kept[0] is alive for alive in gc.get_objects())
assert gc.get_freeze_count() >= 100
assert gc.collect() == 0
"""


def test_what_is_alive_is_looked_at_no_more_and_what_is_not_is_freed():
    # In a process of its own: what is frozen here would stay so for all tests.
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
