"""What the engine core reports of its start: phases, readiness or the failure."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from vllm.exceptions import (
    CheckpointError,
    EngineDeadError,
    UnsupportedError,
    VLLMValidationError,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

# Errors whose message is written for the user and needs no traceback.
USER_ERRORS: tuple[type[Exception], ...] = (
    CheckpointError,
    UnsupportedError,
    VLLMValidationError,
)


class StartupPhase(msgspec.Struct, array_like=True, frozen=True):
    """A part of start-up that is done."""

    name: str
    seconds: float


class EngineCoreReady(msgspec.Struct, array_like=True, frozen=True):
    """The engine core takes requests.

    Args:
        num_gpu_blocks: size of the KV cache, the null block included.
        cache_dtype: of the KV cache, decided.
    """

    num_gpu_blocks: int
    cache_dtype: str
    phases: list[StartupPhase]


class StartupFailure(msgspec.Struct, array_like=True, frozen=True):
    """The engine core could not start.

    Args:
        error_type: name of the exception's class; empty if there was none.
    """

    error_type: str
    message: str

    @classmethod
    def from_exception(cls, error: BaseException) -> "StartupFailure":
        """Return the failure in one line."""
        message = " ".join(str(error).split()) or "no message"
        for user_error in USER_ERRORS:
            if isinstance(error, user_error):
                return cls(user_error.__name__, message)
        return cls(type(error).__name__, message)

    @property
    def reason(self) -> str:
        """The whole of it, in one line."""
        return f"{self.error_type}: {self.message}" if self.error_type else self.message

    def to_exception(self) -> Exception:
        """Return the error to raise in the parent: of the same class if it is known."""
        for user_error in USER_ERRORS:
            if user_error.__name__ == self.error_type:
                return user_error(self.message)
        return EngineDeadError(self.reason)


class StartupReport(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The end of start-up: exactly one field is set."""

    ready: EngineCoreReady | None = None
    failure: StartupFailure | None = None


class StartupClock:
    """Measures the phases of start-up and logs each when it is done."""

    def __init__(self) -> None:
        self.phases: list[StartupPhase] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the block as the phase `name`; a block that raises is no phase.

        Raises:
            UnsupportedError: the block ran out of memory.
        """
        start = time.perf_counter()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise UnsupportedError(
                f"the memory does not suffice for this phase of the start: {name} "
                f"({error}); use a smaller model, or lower --max-model-len, "
                "--max-num-seqs or the KV cache's size"
            ) from error
        self.add(StartupPhase(name, time.perf_counter() - start))

    def add(self, phase: StartupPhase) -> None:
        """Append a phase that was measured elsewhere."""
        self.phases.append(phase)
        logger.info("Start-up: %s took %.2f s", phase.name, phase.seconds)


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    # torch has a class for a device's memory alone, and this text for the host's.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def format_phases(phases: list[StartupPhase], total_seconds: float) -> str:
    """Return the table of start-up times; what no phase covers is shown as `other`."""
    other = total_seconds - sum(phase.seconds for phase in phases)
    rows = [(phase.name, phase.seconds) for phase in phases]
    rows += [("other", max(other, 0.0)), ("total", total_seconds)]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {seconds:6.2f} s" for name, seconds in rows]
    return "\n".join(["Start-up times:", *lines])
