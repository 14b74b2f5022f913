"""Compiled grammars that are kept for the next request with the same constraint."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm.v1.structured_output.backend_types import GrammarError
from vllm.v1.structured_output.compile_pool import CompileBusyError

if TYPE_CHECKING:
    from vllm.v1.structured_output.backend_types import (
        CompiledGrammar,
        StructuredOutputBackend,
    )
    from vllm.v1.structured_output.grammar_spec import GrammarSpec

    Entry = tuple[StructuredOutputBackend, CompiledGrammar]
    Work = Callable[[], Entry]

# What a refusal holds beside its constraint's text.
REFUSAL_BYTES = 1024


class GrammarCache:
    """Least recently used, bounded in entries and in bytes, safe between threads.

    A refusal is kept like a grammar, because finding it can take as long. A compilation
    that runs is shared by everybody who asks for it, and nobody's thread waits for it.

    Args:
        max_entries: grammars that are kept at most.
        max_bytes: of their estimated memory; a larger grammar is not kept at all.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        # The outcome and its estimated bytes.
        self._kept: OrderedDict[GrammarSpec, tuple[Future[Entry], int]] = OrderedDict()
        self._num_bytes = 0
        # Held while submitting, and by the work when it ends: never the other way.
        self._lock = threading.Lock()
        self._running: dict[GrammarSpec, Future[Entry]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of what is kept."""
        return self._num_bytes

    def get_or_submit(
        self,
        spec: "GrammarSpec",
        compile_entry: "Work",
        submit: "Callable[[Work], Future[Entry]]",
    ) -> "Future[Entry]":
        """Return the entry that is kept, or that of the one compilation of it.

        Args:
            submit: starts the work elsewhere; its future may fail before the work
                ends. Until then everybody who asks gets that failure at once.

        Raises:
            CompileBusyError: by `submit`.
        """

        def work() -> "Entry":
            try:
                entry = compile_entry()
            except GrammarError as error:
                self._finish(spec, error, REFUSAL_BYTES + len(spec.text))
                raise
            except BaseException:
                self._finish(spec, None, 0)
                raise
            self._finish(spec, entry, entry[1].num_bytes)
            return entry

        with self._lock:
            if spec in self._kept:
                kept = self._kept[spec][0]
                if not _is_spent(kept):
                    self._kept.move_to_end(spec)
                    return kept
                self._drop(spec)
            running = self._running.get(spec)
            if running is None or _was_dropped(running):
                running = self._running[spec] = submit(work)
            return running

    def _finish(
        self, spec: "GrammarSpec", outcome: "Entry | GrammarError | None", size: int
    ) -> None:
        with self._lock:
            self._running.pop(spec, None)
            if outcome is None or size > self._max_bytes:
                return
            future: Future[Entry] = Future()
            if isinstance(outcome, GrammarError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            if spec in self._kept:
                self._drop(spec)
            self._kept[spec] = future, size
            self._num_bytes += size
            while (
                len(self._kept) > self._max_entries or self._num_bytes > self._max_bytes
            ):
                self._drop(next(iter(self._kept)))

    def _drop(self, spec: "GrammarSpec") -> None:
        _, size = self._kept.pop(spec)
        self._num_bytes -= size


def _is_spent(kept: "Future[Entry]") -> bool:
    return kept.exception() is None and kept.result()[1].is_spent


def _was_dropped(running: "Future[Entry]") -> bool:
    """Whether a compilation was taken out of the queue before it began."""
    if running.cancelled():
        return True
    return running.done() and isinstance(running.exception(), CompileBusyError)
