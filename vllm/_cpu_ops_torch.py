"""The meaning of the CPU operators in torch: for tests, and where none are built.

Functions and arguments are those of `_custom_ops`.
"""

import torch
import torch.nn.functional as F

_MASK = 0xFFFFFFFF


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous()


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, num_columns: int, bias: torch.Tensor | None
) -> torch.Tensor:
    if packed.shape[0] != num_columns:
        raise ValueError(f"the weight has {packed.shape[0]} columns, not {num_columns}")
    return F.linear(x, packed, bias)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale).to(x.dtype) * weight
    return normed if out is None else out.copy_(normed)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    residual += x
    rms_norm(residual, weight, eps, x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_dim: int,
) -> None:
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    for x in (q, k):
        heads = x.view(positions.shape[0], -1, head_dim)
        first = heads[..., :half].float()
        second = heads[..., half : 2 * half].float()
        rotated = first * cos - second * sin, second * cos + first * sin
        heads[..., : 2 * half] = torch.cat(rotated, dim=-1).to(x.dtype)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    block_size, head_size = kv_cache.shape[3], key.shape[-1]
    keys, values = _cache_views(kv_cache)
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    block_ids, offsets = slots // block_size, slots % block_size
    keys[block_ids, :, offsets, :head_size] = key[is_stored]
    values[block_ids, :, offsets, :head_size] = value[is_stored]


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    is_causal: bool,
) -> None:
    block_size, head_size = kv_cache.shape[3], query.shape[-1]
    keys, values = _cache_views(kv_cache)
    for batch_idx, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[batch_idx : batch_idx + 2].tolist()
        blocks = block_table[batch_idx, : -(-seq_len // block_size)]
        # Each becomes [num_kv_heads, seq_len, head_size].
        k, v = (
            x[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len, :head_size]
            for x in (keys, values)
        )
        out[start:end] = attend_dense(query[start:end], k, v, scale, is_causal)


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """Attend from the last tokens of a sequence to all of it.

    Args:
        query: [query_len, num_heads, head_size].
        key: [num_kv_heads, seq_len, head_size], as value.
        scale: of the scores.
        is_causal: False lets every query see every key.

    Returns:
        [query_len, num_heads, head_size].
    """
    query_len, seq_len = query.shape[0], key.shape[1]
    group = query.shape[1] // key.shape[0]
    key, value = (x.repeat_interleave(group, dim=0) for x in (key, value))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), key.float()) * scale
    if is_causal:
        positions = torch.arange(seq_len, device=query.device)
        is_future = positions > positions[seq_len - query_len :, None]
        scores = scores.masked_fill(is_future, float("-inf"))
    out = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), value.float())
    return out.to(query.dtype)


def _cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as [num_blocks, num_kv_heads, block_size, width]."""
    _, num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    transposed = kv_cache[0].view(num_blocks, num_kv_heads, width, block_size)
    return transposed.transpose(2, 3), kv_cache[1]


def philox_uniform(keys: torch.Tensor, num: int) -> torch.Tensor:
    key_low, key_high = keys[:, None] & _MASK, (keys[:, None] >> 32) & _MASK
    c0 = torch.arange(num, device=keys.device).expand(keys.shape[0], num)
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (b >> 32) & _MASK ^ c1 ^ key_low, (a >> 32) & _MASK ^ c3 ^ key_high
        c1, c3 = b & _MASK, a & _MASK
        key_low = (key_low + 0x9E3779B9) & _MASK
        key_high = (key_high + 0xBB67AE85) & _MASK
    folded = torch.where(c0 >= 2**31, _MASK - c0, c0)
    return folded.to(torch.float32) * torch.tensor(4.6566127342e-10)


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, is_greedy: torch.Tensor | None
) -> torch.Tensor:
    draws = philox_uniform(keys, logits.shape[1]).clamp(min=2.0**-33).double()
    scores = logits.double() - (-(-draws).log1p()).log()
    if is_greedy is not None:
        scores = torch.where(is_greedy.bool()[:, None], logits.double(), scores)
    is_candidate = logits > float("-inf")
    scores = scores.masked_fill(~is_candidate, float("-inf"))
    # The first among equals, which torch's argmax does not promise.
    is_best = scores.eq(scores.amax(-1, keepdim=True)) & is_candidate
    token_ids = is_best.to(torch.uint8).cumsum(-1).eq(0).sum(-1)
    return torch.where(is_candidate.any(-1), token_ids, -1)


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> None:
    vocab_size = logits.shape[1]
    for row, num_kept, mass in zip(logits, k.tolist(), p.tolist(), strict=True):
        has_k = 0 < num_kept < vocab_size
        if not has_k and mass >= 1.0:
            continue
        row.masked_fill_(row.isnan(), float("-inf"))
        if has_k:
            kth = row.topk(num_kept).values[-1]
            row.masked_fill_(row < kth, float("-inf"))
        if mass < 1.0:
            row.masked_fill_(row < _lowest_in_nucleus(row, mass), float("-inf"))


def _lowest_in_nucleus(row: torch.Tensor, mass: float) -> torch.Tensor:
    values = row.sort(descending=True).values
    weights = (values - values[0]).exp().double()
    # Tokens strictly more likely than each: those before the first of its equals.
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = values[1:] != values[:-1]
    before = weights.cumsum(0) - weights
    firsts = torch.where(is_first, torch.arange(len(values)), 0).cummax(0).values
    is_kept = before[firsts] < mass * weights.sum()
    is_kept[0] = True
    return values[is_kept][-1]


def logprob_stats(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits > chosen).sum(-1, dtype=torch.int32) + 1
    return logits.logsumexp(-1), rank


def apply_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor
) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    is_allowed = (bitmask[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    for mask_idx, logit_idx in enumerate(rows.tolist()):
        if logit_idx >= 0:
            logits[logit_idx].masked_fill_(is_allowed[mask_idx] == 0, float("-inf"))
