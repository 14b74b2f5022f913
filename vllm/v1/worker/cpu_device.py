"""What an engine takes of a CPU: processors for its threads, and compiled operators."""

import torch

from vllm import _custom_ops as ops
from vllm import envs, platforms
from vllm.exceptions import UnsupportedError
from vllm.logger import init_logger

logger = init_logger(__name__)


def take_cpu() -> None:
    """Bind the threads that this one starts from now on, and say how many they are.

    Raises:
        UnsupportedError: the environment asks for what this machine does not have.
    """
    processors = envs.VLLM_CPU_OMP_THREADS_BIND
    if processors is not None:
        platforms.bind_to_processors(processors, "VLLM_CPU_OMP_THREADS_BIND")
    torch.set_num_threads(platforms.num_usable_cpus())
    _check_operators()


def _check_operators() -> None:
    if ops.has_cpu_ops() or envs.VLLM_CPU_DISABLE_OPS:
        return
    if envs.VLLM_CPU_ISA:
        raise UnsupportedError(
            f"VLLM_CPU_ISA={envs.VLLM_CPU_ISA}: such operators are not built, or this "
            "processor does not run them; without the variable the best ones are taken"
        )
    logger.warning(
        "The compiled operators are not built, or this processor does not run them. "
        "Torch takes their place: several times slower, and with weights that are not "
        "quantised. Install a C++20 compiler, and this package again"
    )
