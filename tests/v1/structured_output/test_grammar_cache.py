import threading
from typing import Any

from vllm.v1.structured_output.grammar_cache import GrammarCache
from vllm.v1.structured_output.grammar_spec import GrammarSpec


class _Compiled:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text, None, ("guidance",))


def entry(num_bytes: int = 1) -> Any:
    return None, _Compiled(num_bytes)


def test_the_same_spec_compiles_once():
    cache = GrammarCache(8, 100)
    calls: list[int] = []

    def compile_entry() -> Any:
        calls.append(1)
        return entry()

    first = cache.get_or_compile(spec("a"), compile_entry)
    assert cache.get_or_compile(spec("a"), compile_entry) is first
    assert len(calls) == 1


def test_the_least_recently_used_entry_leaves_first():
    cache = GrammarCache(2, 100)
    kept = cache.get_or_compile(spec("a"), entry)
    cache.get_or_compile(spec("b"), entry)
    cache.get_or_compile(spec("a"), entry)
    cache.get_or_compile(spec("c"), entry)
    assert cache.get_or_compile(spec("a"), entry) is kept
    assert len(cache) == 2


def test_bytes_are_bounded():
    cache = GrammarCache(100, 10)
    for index in range(50):
        cache.get_or_compile(spec(str(index)), lambda: entry(4))
    assert cache.num_bytes == 8
    assert len(cache) == 2


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept():
    cache = GrammarCache(8, 10)
    large = entry(11)
    assert cache.get_or_compile(spec("a"), lambda: large) is large
    assert len(cache) == 0


def test_a_failure_is_not_kept():
    cache = GrammarCache(8, 10)

    def fail() -> Any:
        raise ValueError("no")

    for _ in range(2):
        try:
            cache.get_or_compile(spec("a"), fail)
        except ValueError:
            continue
    good = entry()
    assert cache.get_or_compile(spec("a"), lambda: good) is good


def test_requests_at_the_same_time_share_one_compilation():
    cache = GrammarCache(8, 100)
    started, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def compile_entry() -> Any:
        calls.append(1)
        started.set()
        go_on.wait(5)
        return entry()

    threads = [
        threading.Thread(target=cache.get_or_compile, args=(spec("a"), compile_entry))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    started.wait(5)
    go_on.set()
    for thread in threads:
        thread.join(5)
    assert len(calls) == 1
