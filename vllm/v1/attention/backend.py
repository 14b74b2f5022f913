"""What every attention backend offers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm._cpu_ops_decoder import DecoderLayerWeights
from vllm._cpu_ops_drafter import (
    BlockDrafterWeights,
    BlockDraws,
    ContextPiece,
    ContextWeights,
)


@dataclass(frozen=True)
class AttentionMetadata:
    """One step, as attention sees it.

    Args:
        query_start_loc: [num_reqs + 1] int32, device truth.
        seq_lens: [num_reqs] int32, tokens in the cache after this step, device truth.
        block_table: [num_reqs, max_blocks] int32.
        slot_mapping: [num_tokens] int64, block id * block size + offset; -1 writes
            nothing.
        num_tokens: exact number of query tokens.
        max_query_len: upper bound, host.
        max_seq_len: upper bound, host.
        block_size: tokens a block.
        is_causal: False lets a query see every key of its request.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    is_causal: bool = True

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self.seq_lens.shape[0]


class LayersRunner(Protocol):
    """Decoder layers as one operation."""

    def __call__(
        self,
        stream: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
        tap_layer_ids: Sequence[int],
        taps: torch.Tensor | None,
    ) -> None:
        """Run all layers.

        Args:
            stream: [T, hidden_size], the residual stream, changed in place.
            positions: [T] int64.
            kv_caches: of all layers.
            metadata: of the step.
            tap_layer_ids: i is the stream that enters layer i; the number of layers is
                the stream in the end.
            taps: [len(tap_layer_ids), T, hidden_size], written; None without taps.
        """


class ContextWriter(Protocol):
    """A drafter's context as one operation."""

    def __call__(
        self,
        pieces: Sequence[ContextPiece],
        kv_caches: Sequence[torch.Tensor],
    ) -> None:
        """Write keys and values of all layers.

        Args:
            pieces: as if each was written after the one before it.
            kv_caches: of all layers.
        """


class BlockDrafter(Protocol):
    """A drafter of blocks as one operation."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
        num_drafts: torch.Tensor,
        num_steps: int,
        max_reqs_at_once: int,
        draws: BlockDraws | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return drafts [R, num_steps] int64, and their scores float32.

        Args:
            input_ids: [R * block_size] int64, a block of each request.
            positions: of its shape.
            kv_caches: of all layers.
            metadata: of the blocks.
            num_drafts: [R] int32; a token past them is -1.
            num_steps: drafts of a request.
            max_reqs_at_once: bounds the logits that exist at once.
            draws: None takes the likeliest tokens.
        """


class AttentionBackend(ABC):
    """Attention over a paged cache, for one device."""

    name: str

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache; keys first, values second."""

    @staticmethod
    @abstractmethod
    def write_kv_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store new keys and values in their slots.

        Args:
            key: [num_tokens, num_kv_heads, head_size], as value.
            kv_cache: of the shape above, changed in place.
            slot_mapping: [num_tokens] int64; -1 writes nothing.
        """

    @staticmethod
    @abstractmethod
    def attend(
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write softmax(scale * q k^T) v of every query token into `out`.

        Each query token sees the keys of its own request up to its own position, whose
        absolute value is `seq_lens - query_len + its place in the query`. Keys that it
        does not see may hold anything, also no number: a rejected draft's do.

        Args:
            query: [num_tokens, num_heads, head_size].
            out: of the query's shape and dtype.
        """

    @staticmethod
    def maybe_fuse_layers(
        layers: Sequence[DecoderLayerWeights],
    ) -> LayersRunner | None:
        """Return whole decoder layers as one operation, if the backend has one.

        Args:
            layers: in their order.
        """
        return None

    @staticmethod
    def maybe_fuse_context_writer(weights: ContextWeights) -> ContextWriter | None:
        """Return what writes a drafter's context as one operation, if there is one."""
        return None

    @staticmethod
    def maybe_fuse_block_drafter(weights: BlockDrafterWeights) -> BlockDrafter | None:
        """Return a drafter of blocks as one operation, if the backend has one."""
        return None
