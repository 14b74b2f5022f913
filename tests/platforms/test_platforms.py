import os
from dataclasses import dataclass

import psutil
import pytest
import torch

from vllm import platforms
from vllm.exceptions import UnsupportedError


@dataclass
class Saved:
    torch_dtype: str


def fake_files(monkeypatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(platforms, "_read", lambda path: files.get(path, ""))


def test_device_follows_what_torch_sees(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(platforms, "_has_cuda_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert platforms.detect_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platforms.detect_device() == "cuda"


def test_target_device_wins(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platforms.detect_device() == "cpu"


def test_target_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        platforms.detect_device()


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
def test_cpu_computes_in_float32(saved):
    assert platforms.default_dtype("cpu", Saved(saved)) == "float32"


@pytest.mark.parametrize(
    ("saved", "has_bfloat16", "expected"),
    [
        ("float16", True, "float16"),
        ("bfloat16", True, "bfloat16"),
        ("float32", True, "bfloat16"),
        ("bfloat16", False, "float16"),
    ],
)
def test_cuda_computes_in_half_precision(saved, has_bfloat16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    assert platforms.default_dtype("cuda", Saved(saved)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_usable_cpus_are_within_the_quota(files, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    fake_files(monkeypatch, files)
    assert platforms.num_usable_cpus() == expected


def test_hyper_threads_of_one_core_count_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    fake_files(monkeypatch, {})
    assert platforms.num_usable_cpus() == 4


def test_available_memory_is_within_the_control_group(monkeypatch):
    gib = 2**30
    fake_files(
        monkeypatch,
        {
            "/sys/fs/cgroup/memory.max": f"{4 * gib}\n",
            "/sys/fs/cgroup/memory.current": f"{3 * gib}\n",
            "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {gib // 2}\n",
        },
    )
    memory = psutil.virtual_memory()._replace(available=64 * gib)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert platforms.available_memory_bytes("cpu") == 3 * gib // 2


def test_available_memory_without_a_limit_is_the_systems(monkeypatch):
    fake_files(monkeypatch, {"/sys/fs/cgroup/memory.max": "max\n"})
    memory = psutil.virtual_memory()._replace(available=12345)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert platforms.available_memory_bytes("cpu") == 12345


def test_a_thread_is_bound_to_processors_that_it_may_use(monkeypatch):
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: bound.append(mask))
    platforms.bind_to_processors(frozenset({0, 2}), "HERE")
    with pytest.raises(
        UnsupportedError, match=r"HERE .* \[3\]; it may use \[0, 1, 2\]"
    ):
        platforms.bind_to_processors(frozenset({2, 3}), "HERE")
    assert bound == [{0, 2}]


def test_others_are_left_the_processors_of_an_engine(monkeypatch):
    left: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: left.append(mask))
    platforms.leave_processors({0, 2, 7})
    # All are taken: whoever is left has to share.
    platforms.leave_processors({0, 1, 2})
    assert left == [{1}]
