"""Attention by the compiled CPU operators: over the pages, nothing gathered.

The model is in float32, the cache in float32 or float16.

A query token's result has the same bits whatever chunk or batch it is computed in.
"""

from collections.abc import Sequence

import torch

from vllm import _custom_ops as ops
from vllm._cpu_ops_decoder import DecoderLayerWeights
from vllm._cpu_ops_drafter import BlockDrafterWeights, BlockDraws, ContextWeights
from vllm.exceptions import UnsupportedError
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    BlockDrafter,
    ContextWriter,
    LayersRunner,
)


class CPUAttentionBackend(AttentionBackend):
    name = "CPU_ATTN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape; a block's keys are stored transposed inside it."""
        if block_size % 16:
            raise UnsupportedError(
                f"the CPU needs a block size that is a multiple of 16, got {block_size}"
            )
        return ops.cpu_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def write_kv_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        ops.reshape_and_cache(key, value, kv_cache, slot_mapping)

    @staticmethod
    def attend(
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        ops.paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale,
            out,
            metadata.is_causal,
        )

    @staticmethod
    def maybe_fuse_layers(
        layers: Sequence[DecoderLayerWeights],
    ) -> LayersRunner | None:
        fused = ops.fuse_decoder_layers(layers)
        if fused is None:
            return None

        def run(
            stream: torch.Tensor,
            positions: torch.Tensor,
            kv_caches: Sequence[torch.Tensor],
            metadata: AttentionMetadata,
            tap_layer_ids: Sequence[int],
            taps: torch.Tensor | None,
        ) -> None:
            fused.run(
                stream,
                positions,
                kv_caches,
                metadata.slot_mapping,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.is_causal,
                tap_layer_ids,
                taps,
            )

        return run

    @staticmethod
    def maybe_fuse_context_writer(weights: ContextWeights) -> ContextWriter | None:
        fused = ops.fuse_context_writer(weights)
        return None if fused is None else fused.run

    @staticmethod
    def maybe_fuse_block_drafter(weights: BlockDrafterWeights) -> BlockDrafter | None:
        fused = ops.fuse_block_drafter(weights)
        if fused is None:
            return None

        def run(
            input_ids: torch.Tensor,
            positions: torch.Tensor,
            kv_caches: Sequence[torch.Tensor],
            metadata: AttentionMetadata,
            num_drafts: torch.Tensor,
            num_steps: int,
            max_reqs_at_once: int,
            draws: BlockDraws | None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return fused.run(
                input_ids,
                positions,
                kv_caches,
                metadata.slot_mapping,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                num_drafts,
                num_steps,
                max_reqs_at_once,
                draws,
            )

        return run
