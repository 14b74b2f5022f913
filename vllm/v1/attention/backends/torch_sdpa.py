"""Attention by plain torch on the CPU, any dtype: gathers each request's keys.

The oracle of the other backends, and what runs where no operators are built.
"""

import torch
import torch.nn.functional as F

from vllm._cpu_ops_torch import cast_to_cache
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata


class TorchSDPABackend(AttentionBackend):
    name = "TORCH_SDPA"

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
        is_stored = slot_mapping >= 0
        slots = slot_mapping[is_stored]
        key_slots, value_slots = kv_cache.flatten(1, 2)
        num_tokens = slot_mapping.shape[0]
        dtype = kv_cache.dtype
        key_slots[slots] = cast_to_cache(key[:num_tokens][is_stored], dtype)
        value_slots[slots] = cast_to_cache(value[:num_tokens][is_stored], dtype)

    @staticmethod
    def attend(
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        starts = metadata.query_start_loc.tolist()
        for batch_idx, seq_len in enumerate(metadata.seq_lens.tolist()):
            start, end = starts[batch_idx], starts[batch_idx + 1]
            if start == end:
                continue
            num_blocks = -(-seq_len // metadata.block_size)
            blocks = kv_cache[:, metadata.block_table[batch_idx, :num_blocks]]
            blocks = blocks.to(query.dtype)
            keys, values = blocks.flatten(1, 2)[:, :seq_len].transpose(1, 2)
            out[start:end] = _attend_one(
                query[start:end], keys, values, scale, metadata.is_causal
            )


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """Attend from the last tokens of one request to all of it.

    Args:
        query: [query_len, num_heads, head_size].
        keys: [num_kv_heads, seq_len, head_size], as values.
        scale: of the scores.
        is_causal: False lets every query see every key.
    """
    query_len, seq_len = query.shape[0], keys.shape[1]
    mask = None
    if is_causal and query_len > 1:
        # A masked key has a weight of zero, which does not hide what is no number: a
        # rejected draft may be one.
        unseen = (
            keys[:, seq_len - query_len + 1 :],
            values[:, seq_len - query_len + 1 :],
        )
        if not all(tokens.isfinite().all() for tokens in unseen):
            return _attend_row_by_row(query, keys, values, scale)
        mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
        mask = mask.tril_(seq_len - query_len)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_row_by_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend as `_attend_one` does, each row with no more than the keys it sees."""
    num_seen = range(keys.shape[1] - query.shape[0] + 1, keys.shape[1] + 1)
    rows = [
        _attend_one(row, keys[:, :seen], values[:, :seen], scale, True)
        for row, seen in zip(query.split(1), num_seen, strict=True)
    ]
    return torch.cat(rows)
