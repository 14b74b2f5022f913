import pytest

from tests.v1.core.fakes import make_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_request_block_hasher,
)
from vllm.v1.request import Request


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def hashes(prompt: list[int], *, config: dict | None = None, **kwargs) -> list[bytes]:
    hasher = get_request_block_hasher(make_config(**(config or {})))
    request = Request("a", prompt, SamplingParams(), block_hasher=hasher, **kwargs)
    return request.block_hashes


def test_free_queue_gives_the_blocks_in_their_order():
    queue = FreeKVCacheBlockQueue(KVCacheBlock(i) for i in range(3))
    assert [queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert queue.num_free_blocks == 0


def test_free_queue_removes_from_the_middle_and_inserts_at_both_ends():
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[1])
    queue.remove(blocks[3])
    assert ids(queue) == [0, 2]
    queue.append(blocks[1])
    queue.prepend(blocks[3])
    assert ids(queue) == [3, 0, 2, 1]
    assert queue.num_free_blocks == 4


def test_free_queue_refuses_a_block_twice_and_an_absent_one():
    block = KVCacheBlock(0)
    queue = FreeKVCacheBlockQueue([block])
    with pytest.raises(AssertionError, match="already free"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(AssertionError, match="not free"):
        queue.remove(block)
    with pytest.raises(AssertionError, match="no free block"):
        queue.popleft()


def test_only_full_blocks_have_a_hash():
    assert [len(hashes(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_equal_prefixes_have_equal_hashes_up_to_the_first_difference():
    first, second = hashes([1] * 12), hashes([1] * 8 + [2] * 4)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_a_hash_covers_everything_before_the_block():
    assert hashes([1] * 4 + [2] * 4)[1] != hashes([3] * 4 + [2] * 4)[1]


def test_equal_blocks_at_two_places_of_a_prompt_differ():
    first, second = hashes([1] * 8)
    assert first != second


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"cache_salt": None}, {"cache_salt": "a"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": None}, {"cache_salt": "None"}),
        ({"config": {"model": "m"}}, {"config": {"model": "n"}}),
    ],
)
def test_salts_separate_contents(left, right):
    assert hashes([1] * 4, **left) != hashes([1] * 4, **right)


def test_the_parent_does_not_salt_while_prefix_caching_is_on():
    assert hashes([1] * 4, parent_request_id="p") == hashes([1] * 4)


def test_without_prefix_caching_only_children_of_one_parent_share():
    off = {"enable_prefix_caching": False}
    first = hashes([1] * 4, config=off, parent_request_id="p")
    assert first == hashes([1] * 4, config=off, parent_request_id="p")
    assert first != hashes([1] * 4, config=off, parent_request_id="q")
    assert hashes([1] * 4, config=off) == []


def test_output_tokens_continue_the_chain():
    hasher = get_request_block_hasher(make_config())
    request = Request("a", [1, 2, 3], SamplingParams(), block_hasher=hasher)
    request.append_output_token_ids([4, 5, 6])
    request.append_output_token_ids([7, 8])
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8])
