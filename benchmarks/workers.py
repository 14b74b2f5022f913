"""Engines in processes of their own, which answer orders one after another."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


class Worker:
    """A process that runs a benchmark's script as one engine.

    Args:
        script: the benchmark; told `--worker`, it calls `answer_orders`.
        arguments: what follows `--worker`.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self.pid = self._process.pid

    def order(self, **order: Any) -> dict[str, Any]:
        """Give an order, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended before its answer: see above")
        return dict(json.loads(line))

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def answer_orders(make_engine: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """Answer the orders on stdin, one JSON object a line, on stdout likewise.

    Args:
        make_engine: returns what answers an order.
    """
    # Libraries print; the answers must stand alone.
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = make_engine()
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
