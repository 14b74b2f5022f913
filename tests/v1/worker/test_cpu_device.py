import os

import pytest
import torch

from vllm import _custom_ops as ops
from vllm import platforms
from vllm.exceptions import UnsupportedError
from vllm.v1.worker import cpu_device


@pytest.fixture
def system(monkeypatch):
    """A machine of four processors, whose threads are not really changed."""
    now = {"affinity": {0, 1, 2, 3}, "threads": None}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: now["affinity"])
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, mask: now.update(affinity=set(mask))
    )
    monkeypatch.setattr(
        platforms, "num_usable_cpus", lambda: len(os.sched_getaffinity(0))
    )
    monkeypatch.setattr(
        torch, "set_num_threads", lambda number: now.update(threads=number)
    )
    return now


@pytest.mark.parametrize(
    ("bind", "processors"), [("auto", {0, 1, 2, 3}), ("1-2", {1, 2}), ("3", {3})]
)
def test_there_is_a_thread_for_every_processor(system, bind, processors, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    cpu_device.take_cpu()
    assert system == {"affinity": processors, "threads": len(processors)}


def test_a_processor_that_is_not_there_is_refused(system, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "2-4")
    with pytest.raises(UnsupportedError, match="VLLM_CPU_OMP_THREADS_BIND"):
        cpu_device.take_cpu()


def test_missing_operators_are_told_unless_they_were_switched_off(
    system, monkeypatch, caplog
):
    monkeypatch.setattr(ops, "has_cpu_ops", lambda: False)
    monkeypatch.setattr(cpu_device.logger, "propagate", True)
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "1")
    cpu_device.take_cpu()
    assert not caplog.messages
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "0")
    cpu_device.take_cpu()
    assert ["not built" in message for message in caplog.messages] == [True]


def test_operators_that_were_named_and_do_not_run_end_the_start(system, monkeypatch):
    monkeypatch.setattr(ops, "has_cpu_ops", lambda: False)
    monkeypatch.setenv("VLLM_CPU_DISABLE_OPS", "0")
    monkeypatch.setenv("VLLM_CPU_ISA", "avx512")
    with pytest.raises(UnsupportedError, match="VLLM_CPU_ISA=avx512"):
        cpu_device.take_cpu()
