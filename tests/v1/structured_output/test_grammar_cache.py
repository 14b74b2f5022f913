from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from vllm.v1.structured_output.backend_types import GrammarError
from vllm.v1.structured_output.compile_pool import CompileBusyError
from vllm.v1.structured_output.grammar_cache import GrammarCache
from vllm.v1.structured_output.grammar_spec import GrammarSpec


class _Compiled:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_spent = False


class _Pool:
    """Runs work when told to; a future may have failed before."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        self.work.append((work, Future()))
        return self.work[-1][1]

    def run(self) -> None:
        for work, future in self.work:
            try:
                result = work()
            except ValueError as error:
                future.set_exception(error)
                continue
            if not future.done():
                future.set_result(result)
        self.work.clear()


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text, None, ("guidance",))


def entry(num_bytes: int = 1) -> Any:
    return None, _Compiled(num_bytes)


def compile_now(cache: GrammarCache, text: str, make: Callable[[], Any] = entry) -> Any:
    pool = _Pool()
    future = cache.get_or_submit(spec(text), make, pool.submit)
    pool.run()
    return future.result(0)


def test_the_same_spec_compiles_once():
    cache = GrammarCache(8, 100)
    first = compile_now(cache, "a")
    assert compile_now(cache, "a") is first


def test_the_least_recently_used_entry_leaves_first():
    cache = GrammarCache(2, 100)
    kept = compile_now(cache, "a")
    compile_now(cache, "b")
    compile_now(cache, "a")
    compile_now(cache, "c")
    assert compile_now(cache, "a") is kept
    assert len(cache) == 2


def test_bytes_are_bounded():
    cache = GrammarCache(100, 10)
    for index in range(50):
        compile_now(cache, str(index), lambda: entry(4))
    assert cache.num_bytes == 8
    assert len(cache) == 2


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept():
    cache = GrammarCache(8, 10)
    large = entry(11)
    assert compile_now(cache, "a", lambda: large) is large
    assert len(cache) == 0


def test_a_refusal_is_kept_like_a_grammar():
    cache = GrammarCache(8, 10_000)
    calls: list[int] = []

    def refuse() -> Any:
        calls.append(1)
        raise GrammarError("no")

    for _ in range(3):
        with pytest.raises(GrammarError):
            compile_now(cache, "a", refuse)
    assert len(calls) == 1


def test_an_unexpected_failure_is_not_kept():
    cache = GrammarCache(8, 10)

    def fail() -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compile_now(cache, "a", fail)
    good = entry()
    assert compile_now(cache, "a", lambda: good) is good


def test_requests_at_the_same_time_share_one_compilation():
    cache, pool = GrammarCache(8, 100), _Pool()
    futures = [cache.get_or_submit(spec("a"), entry, pool.submit) for _ in range(3)]
    assert len(pool.work) == 1
    pool.run()
    assert len({id(future.result(0)) for future in futures}) == 1


def test_an_overdue_compilation_answers_at_once_and_takes_no_other_thread():
    cache, pool = GrammarCache(8, 100), _Pool()
    late = cache.get_or_submit(spec("a"), entry, pool.submit)
    late.set_exception(TimeoutError())
    assert cache.get_or_submit(spec("a"), entry, pool.submit) is late
    assert len(pool.work) == 1
    # It ends after all: the next request gets what it made.
    pool.run()
    assert compile_now(cache, "a") == cache.get_or_submit(
        spec("a"), entry, pool.submit
    ).result(0)


def test_a_compilation_that_was_dropped_from_the_queue_is_started_again():
    cache, pool = GrammarCache(8, 100), _Pool()
    dropped = cache.get_or_submit(spec("a"), entry, pool.submit)
    dropped.set_exception(CompileBusyError())
    pool.work.clear()
    good = entry()
    assert compile_now(cache, "a", lambda: good) is good


def test_a_grammar_that_was_spent_is_compiled_again():
    cache = GrammarCache(8, 100)
    spent = compile_now(cache, "a")
    spent[1].is_spent = True
    again = compile_now(cache, "a")
    assert again is not spent
    assert compile_now(cache, "a") is again
    assert len(cache) == 1
    assert cache.num_bytes == 1
