"""Compiled grammars that are kept for the next request with the same constraint."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.structured_output.backend_types import (
        CompiledGrammar,
        StructuredOutputBackend,
    )
    from vllm.v1.structured_output.grammar_spec import GrammarSpec

    Entry = tuple[StructuredOutputBackend, CompiledGrammar]


class GrammarCache:
    """Least recently used, bounded in entries and in bytes, safe between threads.

    Args:
        max_entries: grammars that are kept at most.
        max_bytes: of their estimated memory; a larger grammar is not kept at all.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSpec, Entry] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._compiling: dict[GrammarSpec, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of what is kept."""
        return self._num_bytes

    def get_or_compile(
        self, spec: "GrammarSpec", compile_entry: Callable[[], "Entry"]
    ) -> "Entry":
        """Return the entry, compiling it if needed, once however many ask for it."""
        with self._lock:
            if (entry := self._get(spec)) is not None:
                return entry
            turn = self._compiling.setdefault(spec, threading.Lock())
        with turn:
            try:
                with self._lock:
                    if (entry := self._get(spec)) is not None:
                        return entry
                entry = compile_entry()
                with self._lock:
                    self._put(spec, entry)
                return entry
            finally:
                with self._lock:
                    self._compiling.pop(spec, None)

    def _get(self, spec: "GrammarSpec") -> "Entry | None":
        entry = self._entries.get(spec)
        if entry is not None:
            self._entries.move_to_end(spec)
        return entry

    def _put(self, spec: "GrammarSpec", entry: "Entry") -> None:
        if entry[1].num_bytes > self._max_bytes:
            return
        self._entries[spec] = entry
        self._num_bytes += entry[1].num_bytes
        while (
            len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes
        ):
            _, (_, evicted) = self._entries.popitem(last=False)
            self._num_bytes -= evicted.num_bytes
