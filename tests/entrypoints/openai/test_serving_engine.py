import asyncio
from collections.abc import AsyncGenerator

import pytest

from vllm.entrypoints.openai.serving_engine import choose_request_id, merge_generators
from vllm.exceptions import VLLMValidationError


class Source:
    """A generator that knows whether it was closed."""

    def __init__(self, *items: object, delay_s: float = 0.0) -> None:
        self.items = items
        self.delay_s = delay_s
        self.is_closed = False

    async def run(self) -> AsyncGenerator[object, None]:
        try:
            for item in self.items:
                await asyncio.sleep(self.delay_s)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


async def test_all_items_come_with_their_number() -> None:
    sources = [Source("a", "b"), Source("c")]
    items = [item async for item in merge_generators([s.run() for s in sources])]
    assert sorted(items) == [(0, "a"), (0, "b"), (1, "c")]
    assert all(source.is_closed for source in sources)


async def test_items_come_when_they_are_there() -> None:
    sources = [Source("late", delay_s=0.1), Source("early")]
    items = [item async for item in merge_generators([s.run() for s in sources])]
    assert items == [(1, "early"), (0, "late")]


async def test_failure_of_one_closes_all() -> None:
    sources = [Source(ValueError("no")), Source("x", "y", delay_s=5)]
    with pytest.raises(ValueError, match="no"):
        async for _ in merge_generators([s.run() for s in sources]):
            pass
    assert sources[0].is_closed
    assert sources[1].is_closed


@pytest.mark.parametrize("number", [1, 3])
async def test_closing_early_closes_all(number: int) -> None:
    sources = [Source("a", "b", "c") for _ in range(number)]
    merged = merge_generators([source.run() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.is_closed for source in sources)


def test_request_id_is_the_clients_or_new() -> None:
    assert choose_request_id("body", "header") == "body"
    assert choose_request_id(None, "header") == "header"
    assert choose_request_id(None, None) != choose_request_id(None, None)


@pytest.mark.parametrize("request_id", ["a b", "a\n", "é", "x" * 257])
def test_request_id_must_suit_a_header(request_id: str) -> None:
    with pytest.raises(VLLMValidationError):
        choose_request_id(request_id, None)
