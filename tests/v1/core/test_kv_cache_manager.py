import pytest

from tests.v1.core.fakes import make_config, make_kv_cache_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

HASHER = get_request_block_hasher(make_config())


def make_manager(num_blocks: int = 9, num_groups: int = 1) -> KVCacheManager:
    return KVCacheManager(
        make_kv_cache_config(num_blocks, num_groups=num_groups),
        max_model_len=64,
        enable_caching=True,
    )


def make_request(request_id: str, prompt: list[int], **params) -> Request:
    sampling_params = SamplingParams(**params)
    return Request(request_id, prompt, sampling_params, block_hasher=HASHER)


def start(manager: KVCacheManager, request: Request, num_tokens: int | None = None):
    """Let a request take its first step."""
    blocks, num_computed = manager.get_computed_blocks(request)
    num_new = (num_tokens or request.num_tokens) - num_computed
    new_blocks = manager.allocate_slots(request, num_new, num_computed, blocks)
    assert new_blocks is not None
    request.num_computed_tokens = num_computed + num_new
    return num_computed, [block.block_id for block in new_blocks]


def test_a_request_gets_whole_blocks():
    manager = make_manager()
    request = make_request("a", list(range(9)))
    assert start(manager, request) == (0, [1, 2, 3])
    assert manager.usage == pytest.approx(3 / 8)
    assert manager.capacity_tokens == 32


def test_new_blocks_come_when_the_last_one_is_full():
    manager = make_manager()
    request = make_request("a", list(range(7)))
    start(manager, request)
    request.append_output_token_ids([1])
    assert manager.allocate_slots(request, 1) == []
    request.num_computed_tokens += 1
    request.append_output_token_ids([2])
    assert len(manager.allocate_slots(request, 1)) == 1


def test_lookahead_slots_end_at_the_models_length():
    manager = KVCacheManager(make_kv_cache_config(9), 8, enable_caching=True)
    request = make_request("a", list(range(6)))
    assert len(manager.allocate_slots(request, 6, num_lookahead_tokens=20)) == 2


def test_nothing_changes_when_blocks_are_missing():
    manager = make_manager(num_blocks=3)
    request = make_request("a", list(range(12)))
    assert manager.allocate_slots(request, 12) is None
    assert manager.usage == 0.0
    manager.check_integrity()


def test_a_later_request_finds_the_prefix_in_the_same_step():
    manager = make_manager()
    start(manager, make_request("a", [1] * 10))
    assert start(manager, make_request("b", [1] * 10)) == (8, [4])
    manager.check_integrity()


def test_one_token_is_always_left_to_compute():
    manager = make_manager()
    start(manager, make_request("a", [1] * 8))
    assert start(manager, make_request("b", [1] * 8))[0] == 4
    assert start(manager, make_request("c", [1] * 9))[0] == 8


def test_only_scheduled_chunks_can_be_found():
    manager = make_manager()
    start(manager, make_request("a", [1] * 12), num_tokens=6)
    assert manager.get_computed_blocks(make_request("b", [1] * 12))[1] == 4


def test_drafts_cannot_be_found():
    manager = make_manager()
    request = make_request("a", [1] * 7)
    start(manager, request)
    request.append_output_token_ids([1])
    # One committed token that fills block 2, and four drafts that fill block 3.
    manager.allocate_slots(request, 5)
    assert manager.get_computed_blocks(make_request("b", [1] * 20))[1] == 8


def test_prompt_logprobs_need_every_row_until_they_were_told():
    manager = make_manager()
    start(manager, make_request("a", [1] * 9))
    request = make_request("b", [1] * 9, prompt_logprobs=0)
    assert manager.get_computed_blocks(request)[1] == 0
    request.append_output_token_ids([1])
    assert manager.get_computed_blocks(request)[1] == 8


def test_a_freed_prefix_is_found_again_and_counts_as_free_until_then():
    manager = make_manager(num_blocks=4)
    first = make_request("a", [1] * 9)
    start(manager, first)
    manager.free(first)
    assert manager.usage == 0.0
    # Two of the three blocks are found, one is new: it fits exactly.
    assert start(manager, make_request("b", [1] * 9)) == (8, [3])
    manager.check_integrity()


def test_found_blocks_are_not_counted_twice():
    manager = make_manager(num_blocks=4)
    first = make_request("a", [1] * 9)
    start(manager, first)
    manager.free(first)
    # Found: 2 of the 3 free blocks. Needed besides: 2. Left: 1.
    second = make_request("b", [1] * 16)
    blocks, num_computed = manager.get_computed_blocks(second)
    assert num_computed == 8
    assert manager.allocate_slots(second, 8, num_computed, blocks) is None
    manager.check_integrity()


def test_blocks_that_will_not_be_computed_are_forgotten():
    manager = make_manager()
    request = make_request("a", [1] * 12)
    start(manager, request, num_tokens=5)
    # Scheduled by the step that preempts it: nothing of this is computed.
    manager.allocate_slots(request, 7)
    manager.free(request)
    assert manager.get_computed_blocks(make_request("b", [1] * 12))[1] == 4
    manager.check_integrity()


def test_reset_leaves_holders_alone_and_stops_their_later_blocks():
    manager = make_manager()
    request = make_request("a", [1] * 8)
    start(manager, request)
    manager.reset_prefix_cache()
    request.append_output_token_ids([1, 1, 1, 1])
    manager.allocate_slots(request, 4)
    assert manager.block_pool.num_cached_blocks == 0
    assert manager.get_computed_blocks(make_request("b", [1] * 12))[1] == 0
    manager.check_integrity()


def test_groups_share_the_block_table():
    manager = make_manager(num_groups=2)
    start(manager, make_request("a", [1] * 5))
    assert manager.get_block_ids("a") == ([1, 2], [1, 2])


def test_a_request_fits_with_the_blocks_that_it_finds():
    manager = make_manager(num_blocks=5)
    holder = make_request("a", [1] * 9)
    start(manager, holder)
    request = make_request("b", [1] * 9)
    blocks, _ = manager.get_computed_blocks(request)
    assert manager.can_hold_all_tokens(request, blocks)
    assert not manager.can_hold_all_tokens(request, [])
    manager.free(holder)
    # Three cached blocks and one empty one are free; two of them are found.
    longer = make_request("c", [1] * 17)
    blocks, _ = manager.get_computed_blocks(longer)
    assert not manager.can_hold_all_tokens(longer, blocks)


def test_lookups_are_counted_in_tokens_until_they_are_taken():
    manager = make_manager()
    manager.record_lookup(10, 8)
    manager.record_lookup(5, 0)
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 15, 8)
    assert manager.take_prefix_cache_stats().requests == 0
