"""Every environment variable that the package reads, with its default and its check."""

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_API_KEY: str | None
    VLLM_LOGGING_LEVEL: str
    VLLM_LOGGING_PREFIX: str
    VLLM_CONFIGURE_LOGGING: bool
    VLLM_CACHE_ROOT: str
    VLLM_TARGET_DEVICE: str
    VLLM_CPU_KVCACHE_SPACE: int
    VLLM_CPU_OMP_THREADS_BIND: frozenset[int] | None
    VLLM_CPU_DISABLE_OPS: bool
    VLLM_CPU_ISA: str
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_ALLOW_LONG_MAX_MODEL_LEN: bool
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int
    VLLM_HTTP_MAX_BODY_BYTES: int
    VLLM_SERVER_DEV_MODE: bool
    VLLM_SHUTDOWN_GRACE: float
    VLLM_MAX_N_SEQUENCES: int
    VLLM_MAX_STOP_STRINGS: int
    VLLM_MAX_COMPLETION_PROMPTS: int
    VLLM_GRAMMAR_COMPILE_TIMEOUT: float
    VLLM_COMPUTE_NANS_IN_LOGITS: bool
    VLLM_GRAMMAR_CACHE_ENTRIES: int
    VLLM_GRAMMAR_CACHE_BYTES: int
    VLLM_LOG_STATS_INTERVAL: float
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN: int


def _integer(name: str, default: int, minimum: int = 0) -> Callable[[], int]:
    def read() -> int:
        text = os.environ.get(name, str(default))
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"{name} must be an integer >= {minimum}, got {text!r}")
        return value

    return read


def _number(name: str, default: float) -> Callable[[], float]:
    def read() -> float:
        text = os.environ.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < float("inf"):
            raise ValueError(f"{name} must be a number > 0, got {text!r}")
        return value

    return read


def _flag(name: str, default: bool) -> Callable[[], bool]:
    def read() -> bool:
        text = os.environ.get(name, "1" if default else "0").lower()
        if text not in {"0", "1", "true", "false"}:
            raise ValueError(f"{name} must be 0 or 1, got {text!r}")
        return text in {"1", "true"}

    return read


def _choice(name: str, default: str, choices: tuple[str, ...]) -> Callable[[], str]:
    def read() -> str:
        text = os.environ.get(name, default)
        folded = text.upper() if default.isupper() else text.lower()
        if folded not in choices:
            shown = ", ".join(choice or "empty" for choice in choices)
            raise ValueError(f"{name} must be one of {shown}, got {text!r}")
        return folded

    return read


def _processors(name: str) -> Callable[[], frozenset[int] | None]:
    def read() -> frozenset[int] | None:
        text = os.environ.get(name, "auto").lower()
        if text in {"auto", "all", "nobind"}:
            return None
        processors: set[int] = set()
        for part in text.split(","):
            found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
            first, last = (int(n) for n in found.groups(found[1])) if found else (0, -1)
            if last < first:
                raise ValueError(
                    f"{name} must be auto, nobind or the processors of one engine, "
                    f"such as 0-3,8; got {text!r}"
                )
            processors.update(range(first, last + 1))
        return frozenset(processors)

    return read


_READERS: dict[str, Callable[[], Any]] = {
    "VLLM_API_KEY": lambda: os.environ.get("VLLM_API_KEY") or None,
    "VLLM_LOGGING_LEVEL": _choice(
        "VLLM_LOGGING_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR")
    ),
    "VLLM_LOGGING_PREFIX": lambda: os.environ.get("VLLM_LOGGING_PREFIX", ""),
    "VLLM_CONFIGURE_LOGGING": _flag("VLLM_CONFIGURE_LOGGING", True),
    "VLLM_CACHE_ROOT": lambda: os.path.expanduser(
        os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    ),
    # Empty means: a CUDA device if torch sees one, else the CPU.
    "VLLM_TARGET_DEVICE": _choice("VLLM_TARGET_DEVICE", "", ("", "cpu", "cuda")),
    # GiB; 0 means a share of the free memory.
    "VLLM_CPU_KVCACHE_SPACE": _integer("VLLM_CPU_KVCACHE_SPACE", 0),
    # Processors for the engine's threads, such as 0-3,8; None: the system decides.
    "VLLM_CPU_OMP_THREADS_BIND": _processors("VLLM_CPU_OMP_THREADS_BIND"),
    # 1 runs the torch twins even where the compiled operators are there.
    "VLLM_CPU_DISABLE_OPS": _flag("VLLM_CPU_DISABLE_OPS", False),
    # Empty means the best that the processor runs; base is AVX2 on x86.
    "VLLM_CPU_ISA": _choice(
        "VLLM_CPU_ISA", "", ("", "portable", "base", "avx512", "avx512_vnni")
    ),
    "VLLM_ENABLE_V1_MULTIPROCESSING": _flag("VLLM_ENABLE_V1_MULTIPROCESSING", False),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _flag("VLLM_ALLOW_LONG_MAX_MODEL_LEN", False),
    # Seconds.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _integer("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5),
    "VLLM_HTTP_MAX_BODY_BYTES": _integer("VLLM_HTTP_MAX_BODY_BYTES", 16 * 2**20, 1024),
    # Endpoints that only a developer needs, such as /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": _flag("VLLM_SERVER_DEV_MODE", False),
    # Seconds that requests in flight are given when the server is told to stop.
    "VLLM_SHUTDOWN_GRACE": _number("VLLM_SHUTDOWN_GRACE", 2.0),
    "VLLM_MAX_N_SEQUENCES": _integer("VLLM_MAX_N_SEQUENCES", 16384, 1),
    "VLLM_MAX_STOP_STRINGS": _integer("VLLM_MAX_STOP_STRINGS", 16, 1),
    "VLLM_MAX_COMPLETION_PROMPTS": _integer("VLLM_MAX_COMPLETION_PROMPTS", 1024, 1),
    # Seconds a grammar may take to compile before its request gets a 400.
    "VLLM_GRAMMAR_COMPILE_TIMEOUT": _number("VLLM_GRAMMAR_COMPILE_TIMEOUT", 5.0),
    # Compiled grammars that are kept, and their estimated bytes.
    "VLLM_GRAMMAR_CACHE_ENTRIES": _integer("VLLM_GRAMMAR_CACHE_ENTRIES", 512, 1),
    "VLLM_GRAMMAR_CACHE_BYTES": _integer("VLLM_GRAMMAR_CACHE_BYTES", 256 << 20, 1),
    # 1 ends a request with an error as soon as its logits hold a NaN.
    "VLLM_COMPUTE_NANS_IN_LOGITS": _flag("VLLM_COMPUTE_NANS_IN_LOGITS", False),
    # Seconds between two lines of statistics in the log.
    "VLLM_LOG_STATS_INTERVAL": _number("VLLM_LOG_STATS_INTERVAL", 10.0),
    # Tokens in front of those of the steps that are timed before the first request.
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": _integer(
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", 8192
    ),
}


def __getattr__(name: str) -> Any:
    if name in _READERS:
        return _READERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unknown_variables() -> list[str]:
    """Return the names of set `VLLM_*` variables that nothing here reads."""
    return sorted(
        name for name in os.environ if name.startswith("VLLM_") and name not in _READERS
    )


def validate() -> None:
    """Read every variable once, so that a bad value is an error at start.

    Raises:
        ValueError: a variable holds a value that it cannot have.
    """
    for reader in _READERS.values():
        reader()
