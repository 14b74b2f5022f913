"""Which blocks hold a request's KV, and which prefixes are already computed."""

from collections import Counter
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request


class _RequestBlocks:
    """The blocks of one request, in the order of its tokens.

    Args:
        blocks: those found in the prefix cache.
    """

    __slots__ = ("blocks", "is_cacheable", "num_cached_blocks")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks = list(blocks)
        # Leading blocks whose content was offered to the prefix cache.
        self.num_cached_blocks = len(blocks)
        # False after a reset: later blocks build on contents that were forgotten.
        self.is_cacheable = True


class KVCacheManager:
    """Gives blocks to requests, and finds the ones that are already filled.

    All groups (the target's layers, a drafter's) use one block table: a block id means
    the same tokens in each of them, so that a cached prefix is there for all.

    A full block can be found from the moment it is scheduled. That is sound because the
    step runs as scheduled, and writes a layer's KV of all tokens before any of them
    attends; only requests scheduled later in the same step or in later steps find it.

    Args:
        kv_cache_config: how many blocks there are and which groups use them.
        max_model_len: no slots are given beyond it.
        enable_caching: count look-ups; without it no request has hashes except the
            children of n > 1 requests.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, max_model_len: int, enable_caching: bool
    ) -> None:
        block_sizes = {
            group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups
        }
        assert len(block_sizes) == 1, "groups with one block table share a block size"
        (self.block_size,) = block_sizes
        self.block_pool = BlockPool(kv_cache_config.num_blocks)
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._max_model_len = max_model_len
        self._enable_caching = enable_caching
        self._requests: dict[str, _RequestBlocks] = {}
        self._prefix_cache_stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        pool = self.block_pool
        return 1.0 - pool.num_free_blocks / pool.num_usable_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one request that has the whole pool."""
        return self.block_pool.num_usable_blocks * self.block_size

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Find the longest cached prefix of a request that holds no blocks.

        At least one token is left to compute: its logits are needed.

        Returns:
            blocks: the cached ones, not yet held.
            num_computed_tokens: tokens in them.
        """
        # The prompt's log-probabilities need all its rows, until they were delivered.
        if (
            request.sampling_params.prompt_logprobs is not None
            and request.num_output_tokens == 0
        ):
            return [], 0
        max_hits = (request.num_tokens - 1) // self.block_size
        blocks: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[:max_hits]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[KVCacheBlock] = (),
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Make room for the tokens of a step.

        Args:
            num_new_tokens: tokens to compute, drafts included.
            num_new_computed_tokens: tokens in `new_computed_blocks`, which the request
                holds from now on.
            num_lookahead_tokens: slots behind the new tokens, for a drafter.

        Returns:
            The blocks that the request got in addition to the computed ones, or None,
            and nothing has changed, if there are not enough.
        """
        state = self._requests.get(request.request_id)
        num_tokens = (
            request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        )
        num_held = len(new_computed_blocks if state is None else state.blocks)
        num_new_blocks = (
            self._num_blocks_for(num_tokens + num_lookahead_tokens) - num_held
        )
        if num_new_blocks > 0 and num_new_blocks > self._num_available_blocks(
            new_computed_blocks
        ):
            return None
        if state is None:
            self.block_pool.touch(new_computed_blocks)
            state = self._requests[request.request_id] = _RequestBlocks(
                new_computed_blocks
            )
        new_blocks = self.block_pool.get_new_blocks(max(num_new_blocks, 0))
        state.blocks.extend(new_blocks)
        self._cache_full_blocks(request, state, num_tokens)
        return new_blocks

    def can_hold_all_tokens(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Whether all known tokens of a request without blocks fit at once.

        Args:
            new_computed_blocks: found in the prefix cache.
        """
        num_new_blocks = self._num_blocks_for(request.num_tokens) - len(
            new_computed_blocks
        )
        return num_new_blocks <= self._num_available_blocks(new_computed_blocks)

    def free(self, request: Request) -> None:
        """Let go of a request's blocks, if it holds any.

        Blocks that were scheduled but will not be computed (the request was preempted
        by the step that scheduled it) are no longer found.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        first_uncomputed = request.num_computed_tokens // self.block_size
        for block in state.blocks[first_uncomputed : state.num_cached_blocks]:
            self.block_pool.uncache_block(block)
        self.block_pool.free_blocks(state.blocks)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return all blocks of a request, one list a group."""
        return self.to_block_ids(self._requests[request_id].blocks)

    def to_block_ids(self, blocks: Sequence[KVCacheBlock]) -> tuple[list[int], ...]:
        """Return the ids of blocks, one list a group."""
        block_ids = [block.block_id for block in blocks]
        return (block_ids,) * self._num_groups

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count a request's first look-up in the prefix cache, in tokens."""
        if self._enable_caching:
            stats = self._prefix_cache_stats
            stats.requests += 1
            stats.queries += num_tokens
            stats.hits += num_hits

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """Return the counts since the last call."""
        stats, self._prefix_cache_stats = self._prefix_cache_stats, PrefixCacheStats()
        return stats

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; requests that hold blocks keep them."""
        self.block_pool.reset_prefix_cache()
        for state in self._requests.values():
            state.is_cacheable = False
        self._prefix_cache_stats.reset = True

    def check_integrity(self) -> None:
        """Check that no block is lost and that each has as many holders as it counts.

        Raises:
            AssertionError: the counts do not add up.
        """
        num_holders = Counter(
            block.block_id
            for state in self._requests.values()
            for block in state.blocks
        )
        self.block_pool.check_integrity(num_holders)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def _num_available_blocks(self, new_computed_blocks: Sequence[KVCacheBlock]) -> int:
        # A cached block that nobody holds counts as free until it is touched.
        num_unheld = sum(block.ref_cnt == 0 for block in new_computed_blocks)
        return self.block_pool.num_free_blocks - num_unheld

    def _cache_full_blocks(
        self, request: Request, state: _RequestBlocks, num_tokens: int
    ) -> None:
        if not state.is_cacheable:
            return
        # Only committed tokens have hashes: drafts may be rejected.
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        for index in range(state.num_cached_blocks, num_full):
            self.block_pool.cache_block(
                state.blocks[index], request.block_hashes[index]
            )
        state.num_cached_blocks = max(state.num_cached_blocks, num_full)
