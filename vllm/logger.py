"""Logging in one format for every process of the engine."""

import logging
import os
import sys

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class _PrefixFormatter(logging.Formatter):
    """Put the process's name before each line, so that mixed logs stay readable."""

    def __init__(self, process_name: str) -> None:
        super().__init__(_FORMAT, _DATE_FORMAT)
        self.prefix = f"({process_name} pid={os.getpid()}) " if process_name else ""

    def format(self, record: logging.LogRecord) -> str:
        return envs.VLLM_LOGGING_PREFIX + self.prefix + super().format(record)


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; the first call configures the root of `vllm`."""
    root = logging.getLogger("vllm")
    if not root.handlers and envs.VLLM_CONFIGURE_LOGGING:
        configure_logging("")
    return logging.getLogger(name)


def configure_logging(process_name: str) -> None:
    """Send the package's records to stderr, each line marked with `process_name`."""
    root = logging.getLogger("vllm")
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrefixFormatter(process_name))
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False
