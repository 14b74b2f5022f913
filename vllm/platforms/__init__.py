"""What the devices of this machine can do, asked in one place."""

import ctypes
import math
import os
import platform
from collections.abc import Set
from typing import Protocol

from vllm import envs
from vllm.exceptions import UnsupportedError

_CGROUP_V2 = "/sys/fs/cgroup"
_CGROUP_V1_CPU = "/sys/fs/cgroup/cpu"
_CGROUP_V1_MEMORY = "/sys/fs/cgroup/memory"


class SavedDtype(Protocol):
    """A model's configuration, as far as the choice of a dtype needs it."""

    @property
    def torch_dtype(self) -> str:
        """The dtype that the checkpoint was saved in."""


def detect_device() -> str:
    """Return "cuda" if torch sees a CUDA device, else "cpu".

    Raises:
        UnsupportedError: VLLM_TARGET_DEVICE asks for a device that is not there.
    """
    target = envs.VLLM_TARGET_DEVICE
    if target == "cpu":
        return "cpu"
    # A process that serves HTTP needs torch for this question alone, and torch takes
    # more than a second to load.
    if target != "cuda" and not _has_cuda_driver():
        return "cpu"
    import torch

    if target == "cuda" or torch.cuda.is_available():
        check_device("cuda", "VLLM_TARGET_DEVICE=cuda")
        return "cuda"
    return "cpu"


def check_device(device: str, asked_by: str) -> None:
    """Check that a device that was asked for is there.

    Args:
        asked_by: what asked for it, for the error.

    Raises:
        UnsupportedError: it is not.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"{asked_by}, but torch sees no CUDA device: leave it out to run on the "
            "CPU, or install a torch build with CUDA and a driver"
        )


def default_dtype(device: str, hf_config: SavedDtype) -> str:
    """Return the dtype to compute in when the user leaves it open.

    On CPU it is float32: bfloat16 is emulated without AVX-512, and with it the greedy
    text departs from the float32 text.
    """
    if device == "cpu":
        return "float32"
    if hf_config.torch_dtype == "float16":
        return "float16"
    import torch

    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


def device_name(device: str) -> str:
    """Return what the device calls itself."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_memory_bytes(device: str) -> int:
    """Return the memory that can still be allocated on `device`.

    On CPU, what the operating system can give without swapping, and no more than what
    is left under the control group's limit.
    """
    if device == "cuda":
        import torch

        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes
    import psutil

    available = psutil.virtual_memory().available
    left_in_group = _cgroup_memory_left()
    return available if left_in_group is None else min(available, left_in_group)


def num_usable_cpus() -> int:
    """Return how many cores this process may keep busy, at least 1.

    The least of the affinity mask, the control group's quota and the physical cores:
    two threads on one core's hyper-threads slow a matrix product down.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    if quota is not None:
        usable = min(usable, math.ceil(quota))
    import psutil

    physical = psutil.cpu_count(logical=False)
    if physical and psutil.cpu_count() != physical:
        usable = min(usable, physical)
    return max(usable, 1)


def bind_to_processors(processors: Set[int], asked_by: str) -> None:
    """Run this thread, and those that it starts from now on, on some processors only.

    Args:
        asked_by: what named them, for the error.

    Raises:
        UnsupportedError: the system cannot bind threads, or one is not this process's.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError(f"{asked_by}: this system does not bind threads")
    usable = os.sched_getaffinity(0)
    if not processors <= usable:
        raise UnsupportedError(
            f"{asked_by} names processors that this process may not use: "
            f"{sorted(processors - usable)}; it may use {sorted(usable)}"
        )
    os.sched_setaffinity(0, processors)


def leave_processors(processors: Set[int]) -> None:
    """Keep this thread away from processors of others, if any are left without them."""
    if not hasattr(os, "sched_setaffinity"):
        return
    left = os.sched_getaffinity(0) - processors
    if left:
        os.sched_setaffinity(0, left)


def _has_cuda_driver() -> bool:
    """Return whether the driver's library is there, as torch needs it to be."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _cgroup_cpu_quota() -> float | None:
    """Return the quota in cores; None where there is none."""
    version_2 = _read(f"{_CGROUP_V2}/cpu.max").split()
    if len(version_2) == 2:
        quota, period = version_2
    else:
        quota = _read(f"{_CGROUP_V1_CPU}/cpu.cfs_quota_us").strip()
        period = _read(f"{_CGROUP_V1_CPU}/cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _cgroup_memory_left() -> int | None:
    """Return the bytes left under the limit; None where there is none."""
    limit = _read(f"{_CGROUP_V2}/memory.max").strip()
    used = _read(f"{_CGROUP_V2}/memory.current").strip()
    statistics = _read(f"{_CGROUP_V2}/memory.stat")
    if not limit:
        limit = _read(f"{_CGROUP_V1_MEMORY}/memory.limit_in_bytes").strip()
        used = _read(f"{_CGROUP_V1_MEMORY}/memory.usage_in_bytes").strip()
        statistics = _read(f"{_CGROUP_V1_MEMORY}/memory.stat")
    if not limit.isdigit() or not used.isdigit():
        return None
    # Pages of files that are not in use count as used, yet are given up on demand.
    inactive_file = 0
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"}:
            inactive_file = int(value)
    return max(int(limit) - int(used) + inactive_file, 0)


def _read(path: str) -> str:
    """Return the text of a small file; "" where it is not there."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
