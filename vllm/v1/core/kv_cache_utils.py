"""Blocks of the KV cache, the list of the free ones, and the hashes of contents."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator

from vllm.config import VllmConfig
from vllm.v1.request import BlockHasher, Request

NULL_BLOCK_ID = 0
# Long enough that nobody finds two contents with one hash.
_DIGEST_BYTES = 32


class KVCacheBlock:
    """One block; only the block pool and the free list change it.

    Args:
        block_id: the block's place in every layer's cache.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        # Set while the content can be found in the prefix cache.
        self.block_hash: bytes | None = None
        # Neighbours in the free list; both None outside it.
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        state = f"ref_cnt={self.ref_cnt}, cached={self.block_hash is not None}"
        return f"KVCacheBlock({self.block_id}, {state})"


class FreeKVCacheBlockQueue:
    """The free blocks, in the order in which they will be used again.

    A doubly linked list, so that a block found in the prefix cache can leave from the
    middle in constant time. The block itself is the node.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        # Never handed out; they spare the special cases at both ends.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        for block in blocks:
            self.append(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """Take the block that is to be used first."""
        assert self.num_free_blocks > 0, "no free block"
        block = self._head.next_free
        assert block is not None, "the free list is broken"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the list, wherever it is."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not free"
        assert after is not None, f"{block} is not free"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block where it is used last."""
        before = self._tail.prev_free
        assert before is not None, "the free list is broken"
        self._insert_after(before, block)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block where it is used first."""
        self._insert_after(self._head, block)

    def _insert_after(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        assert block.next_free is None, f"{block} is already free"
        after = before.next_free
        assert after is not None, "the free list is broken"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free_blocks += 1


def get_request_block_hasher(vllm_config: VllmConfig) -> BlockHasher:
    """Return the function that hashes the full blocks of a request.

    A hash covers the block's tokens and everything before them, and is salted by what
    else makes the content: the model, and the request's `cache_salt`. With prefix
    caching off only children of one n > 1 request share blocks, so their hashes are
    salted with the parent's id, and other requests have none.
    """
    block_size = vllm_config.cache_config.block_size
    is_caching = vllm_config.cache_config.enable_prefix_caching
    model = (vllm_config.model_config.model, vllm_config.model_config.dtype)

    def hash_new_blocks(request: Request) -> list[bytes]:
        num_hashed = len(request.block_hashes)
        num_full = request.num_tokens // block_size
        if num_full <= num_hashed:
            return []
        if not is_caching and request.parent_request_id is None:
            return []
        if num_hashed:
            parent = request.block_hashes[-1]
        else:
            owner = None if is_caching else request.parent_request_id
            parent = _digest(repr((model, request.cache_salt, owner)).encode())
        hashes = []
        for start in range(num_hashed * block_size, num_full * block_size, block_size):
            token_ids = request.all_token_ids[start : start + block_size]
            parent = _digest(parent + array("q", token_ids).tobytes())
            hashes.append(parent)
        return hashes

    return hash_new_blocks


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
