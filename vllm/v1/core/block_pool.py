"""The pool of KV-cache blocks: which are held, and which contents can be found."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import (
    NULL_BLOCK_ID,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)


class BlockPool:
    """All blocks, each either free or held by at least one request.

    A free block keeps its content until it is used again, the longest unused first, so
    that later requests can find it by its hash.

    Args:
        num_blocks: with block 0, the null block, which is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block needs another one beside it"
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free = FreeKVCacheBlockQueue(self.blocks[NULL_BLOCK_ID + 1 :])
        self._cached: dict[bytes, KVCacheBlock] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached contents included."""
        return self._free.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Contents that can be found by their hash."""
        return len(self._cached)

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """Return the block with this content, free or in use."""
        return self._cached.get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks; what they held is forgotten."""
        assert num_blocks <= self.num_free_blocks, (
            f"{num_blocks} blocks wanted, {self.num_free_blocks} free"
        )
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            assert block.ref_cnt == 0, f"{block} is free and held"
            block.ref_cnt = 1
            self.uncache_block(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks that were found in the cache."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of a request's blocks, given in the order of its tokens.

        The last blocks are used again before the first, which more requests share, and
        blocks without a cached content before all others.
        """
        for block in reversed(blocks):
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)
            else:
                self._free.append(block)

    def cache_block(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full block's content findable, unless an equal one already is."""
        assert block.block_hash is None, f"{block} is cached under another hash"
        if self._cached.setdefault(block_hash, block) is block:
            block.block_hash = block_hash

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Forget a block's content."""
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None

    def reset_prefix_cache(self) -> None:
        """Forget every content; who holds blocks keeps them."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()

    def check_integrity(self, num_holders: dict[int, int]) -> None:
        """Compare the pool with what its users hold.

        Args:
            num_holders: block id -> number of requests that hold it, if any.

        Raises:
            AssertionError: a block is lost, freed while held, or held while free.
        """
        free_ids = {block.block_id for block in self._free}
        num_used = sum(block.ref_cnt > 0 for block in self.blocks)
        assert len(free_ids) == self.num_free_blocks, "the free list has a wrong count"
        assert num_used + len(free_ids) == self.num_usable_blocks, (
            f"{num_used} used + {len(free_ids)} free blocks are not "
            f"{self.num_usable_blocks}"
        )
        assert NULL_BLOCK_ID not in free_ids, "the null block is in the free list"
        for block in self.blocks:
            holders = num_holders.get(block.block_id, 0)
            assert block.ref_cnt == holders, f"{block} has {holders} holders"
            assert (block.block_id in free_ids) == (
                block.ref_cnt == 0 and block is not self.null_block
            ), f"{block} is wrongly in or out of the free list"
            assert (
                block.block_hash is None or self._cached.get(block.block_hash) is block
            ), f"{block} cannot be found by its hash"
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        assert num_hashed == len(self._cached), (
            "the cache names blocks of other content"
        )
