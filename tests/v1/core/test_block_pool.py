import pytest

from vllm.v1.core.block_pool import BlockPool


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.num_free_blocks == 0


def test_more_blocks_than_are_free_is_a_fault_of_the_caller():
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        BlockPool(4).get_new_blocks(4)


def test_a_freed_block_keeps_its_content_until_it_is_used_again():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x")
    pool.free_blocks([block])
    assert pool.get_cached_block(b"x") is block
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"x") is None
    assert pool.num_cached_blocks == 0


def test_blocks_without_content_are_used_before_cached_ones():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    pool.cache_block(blocks[0], b"x")
    pool.cache_block(blocks[1], b"y")
    pool.free_blocks(blocks)
    # 4 and 3 hold nothing; 2 is behind 1 in its request, so it goes first.
    assert ids(pool.get_new_blocks(4)) == [3, 4, 2, 1]


def test_the_longest_unused_content_is_evicted_first():
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_block(first, b"first")
    pool.cache_block(second, b"second")
    pool.free_blocks([first])
    pool.free_blocks([second])
    pool.touch([first])
    pool.free_blocks([first])
    assert ids(pool.get_new_blocks(1)) == [second.block_id]
    assert pool.get_cached_block(b"first") is first


def test_a_touched_free_block_leaves_the_free_list():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x")
    pool.free_blocks([block])
    pool.touch([block])
    assert pool.num_free_blocks == 1
    pool.check_integrity({block.block_id: 1})


def test_a_shared_block_is_free_after_its_last_holder():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free_blocks == 1
    pool.free_blocks([block])
    assert pool.num_free_blocks == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block])


def test_the_first_block_with_a_content_keeps_the_name():
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_block(first, b"x")
    pool.cache_block(second, b"x")
    assert pool.get_cached_block(b"x") is first
    pool.check_integrity({first.block_id: 1, second.block_id: 1})


def test_reset_forgets_contents_and_keeps_holders():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x")
    pool.reset_prefix_cache()
    assert pool.get_cached_block(b"x") is None
    pool.check_integrity({block.block_id: 1})


def test_integrity_sees_a_lost_block_and_a_wrong_count():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="has 0 holders"):
        pool.check_integrity({})
    block.ref_cnt = 0
    with pytest.raises(AssertionError, match="0 used"):
        pool.check_integrity({})


def test_integrity_sees_a_stale_cache_entry():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"x")
    block.block_hash = None
    with pytest.raises(AssertionError, match="other content"):
        pool.check_integrity({block.block_id: 1})
