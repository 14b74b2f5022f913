"""Attention by Triton kernels over the paged cache, for CUDA devices.

Prefill chunks, decodes and verification rows take one path. A program owns one
key/value head and a tile of (query token, query head) rows that share every key.
"""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata


class TritonAttentionBackend(AttentionBackend):
    name = "TRITON_ATTN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def write_kv_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_tokens = slot_mapping.shape[0]
        num_kv_heads, head_size = key.shape[1:]
        if num_tokens == 0:
            return
        _write_kv_cache_kernel[(num_tokens,)](
            key,
            value,
            kv_cache,
            slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            kv_cache.stride(0),
            num_kv_heads,
            HEAD_SIZE=head_size,
            PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
            PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        )

    @staticmethod
    def attend(
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        num_heads, head_size = query.shape[1:]
        num_kv_heads = kv_cache.shape[3]
        if metadata.num_reqs == 0 or metadata.max_query_len == 0:
            return
        group = num_heads // num_kv_heads
        # A tile of 16 rows is the smallest that tensor cores take: enough for a decode.
        wanted_rows = min(metadata.max_query_len * group, 64)
        tile_rows = max(16, triton.next_power_of_2(max(wanted_rows, group)))
        tile_tokens = tile_rows // group
        # Many keys a turn for decodes, which wait for memory.
        tile_keys = 32 if head_size > 128 or tile_rows > 16 else 64
        grid = (
            metadata.num_reqs,
            num_kv_heads,
            triton.cdiv(metadata.max_query_len, tile_tokens),
        )
        _paged_attention_kernel[grid](
            query,
            kv_cache,
            out,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale,
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_cache.stride(2),
            kv_cache.stride(3),
            metadata.block_table.stride(0),
            GROUP=group,
            HEAD_SIZE=head_size,
            PADDED_HEAD_SIZE=max(16, triton.next_power_of_2(head_size)),
            BLOCK_SIZE=metadata.block_size,
            TILE_TOKENS=tile_tokens,
            TILE_ROWS=tile_rows,
            TILE_KEYS=tile_keys,
            IS_CAUSAL=metadata.is_causal,
            num_warps=8 if tile_rows == 64 and head_size >= 128 else 4,
        )


@triton.jit
def _write_kv_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_SIZE]
    value_ptr,  # [num_tokens, num_kv_heads, HEAD_SIZE]
    kv_cache_ptr,  # [2, num_slots, num_kv_heads, HEAD_SIZE]
    slot_mapping_ptr,  # [num_tokens]
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    values_stride,
    num_kv_heads,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    # One program per token.
    token_idx = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token_idx)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_HEAD_SIZE)[None, :]
    is_real = (heads < num_kv_heads) & (dims < HEAD_SIZE)
    key = tl.load(
        key_ptr + token_idx * key_token_stride + heads * key_head_stride + dims,
        mask=is_real,
        other=0.0,
    )
    value = tl.load(
        value_ptr + token_idx * value_token_stride + heads * value_head_stride + dims,
        mask=is_real,
        other=0.0,
    )
    slot_ptr = kv_cache_ptr + slot.to(tl.int64) * num_kv_heads * HEAD_SIZE
    offsets = heads * HEAD_SIZE + dims
    tl.store(slot_ptr + offsets, key, mask=is_real)
    tl.store(slot_ptr + values_stride + offsets, value, mask=is_real)


@triton.jit
def _paged_attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    kv_cache_ptr,  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    out_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    block_table_ptr,  # [num_reqs, max_blocks]
    query_start_loc_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    scale,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    values_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    head_stride: tl.int64,
    block_table_stride: tl.int64,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    query_start = tl.load(query_start_loc_ptr + batch_idx)
    query_len = tl.load(query_start_loc_ptr + batch_idx + 1) - query_start
    first_token = tl.program_id(2) * TILE_TOKENS
    # The grid is as deep as the longest query of the batch.
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + batch_idx)

    rows = tl.arange(0, TILE_ROWS)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    positions = seq_len - query_len + tokens
    dims = tl.arange(0, PADDED_HEAD_SIZE)
    is_dim = dims < HEAD_SIZE
    token_idx = (query_start + tokens).to(tl.int64)
    is_query = is_row[:, None] & is_dim[None, :]
    query = tl.load(
        query_ptr
        + token_idx[:, None] * query_token_stride
        + heads[:, None] * query_head_stride
        + dims[None, :],
        mask=is_query,
        other=0.0,
    )

    num_keys = seq_len
    if IS_CAUSAL:
        last_token = tl.minimum(first_token + TILE_TOKENS, query_len)
        num_keys = seq_len - query_len + last_token
    cache_ptr = kv_cache_ptr + kv_head * head_stride
    table_ptr = block_table_ptr + batch_idx * block_table_stride
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_HEAD_SIZE], tl.float32)
    for start in range(0, num_keys, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        is_key = keys < num_keys
        block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0)
        slots = (
            block_ids.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * slot_stride
        )
        key = tl.load(
            cache_ptr + slots[None, :] + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        value = tl.load(
            cache_ptr + values_stride + slots[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        # A weight of zero does not hide what is no number: a rejected draft may be one.
        # So it goes into the scores, which have a mask.
        is_number = tl.abs(value.to(tl.float32)) < float("inf")
        value = tl.where(is_number, value, 0.0)
        has_numbers = tl.min(is_number.to(tl.int32), axis=1) > 0
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(has_numbers[None, :], scores, float("nan"))
        is_seen = is_key[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (keys[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))

        # Key 0 is seen by every row, so the maximum is finite from the first turn on.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_max[:, None])
        alpha = tl.exp(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(weights, axis=1)
        row_max = new_max
        acc = acc * alpha[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")

    acc = acc / row_sum[:, None]
    tl.store(
        out_ptr
        + token_idx[:, None] * out_token_stride
        + heads[:, None] * out_head_stride
        + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_query,
    )
