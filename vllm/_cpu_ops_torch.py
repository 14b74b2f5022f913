"""The meaning of the CPU operators in torch: for tests, and where none are built.

Functions and arguments are those of `_custom_ops`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

_MASK = 0xFFFFFFFF

# Values of a block that share a scale; the block's bytes before its values.
_BLOCK = 32
_HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}
# What is subtracted from every value of four bits.
_OFFSETS = {"Q4_0": 8, "Q4_1": 0}
# How far 127 steps must reach; anything smaller counts as zero.
_SMALLEST_RANGE = 1e-30


class LinearStatistics(NamedTuple):
    """What `linear_statistics` says of the products of some rows.

    Args:
        argmax: [M] int64, of all rows, as `linear_argmax`.
        ids: [n, count] int64, the columns of the largest products, in their order.
        products: [n, count] float32, of these columns.
        logsumexp: [n] float32.
        written: [m, N] float32, all products of other rows, or of the same.
    """

    argmax: torch.Tensor
    ids: torch.Tensor
    products: torch.Tensor
    logsumexp: torch.Tensor
    written: torch.Tensor


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous()


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, num_columns: int, bias: torch.Tensor | None
) -> torch.Tensor:
    if packed.shape[0] != num_columns:
        raise ValueError(f"the weight has {packed.shape[0]} columns, not {num_columns}")
    return F.linear(x, packed, bias)


def block_row_bytes(quant_type: str, size: int) -> int:
    """Return the bytes of a row of GGUF blocks; 0 where it is not whole blocks."""
    values = _BLOCK if quant_type == "Q8_0" else _BLOCK // 2
    is_whole = size > 0 and size % _BLOCK == 0
    return size // _BLOCK * (_HEADER_BYTES[quant_type] + values) * is_whole


def check_quantized_size(size: int) -> None:
    """Refuse columns without a value: there is nothing that a scale could be of.

    Raises:
        ValueError: the weight has no values a column.
    """
    if size < 1:
        raise ValueError(f"a quantised weight cannot have {size} values a column")


def pack_blocks(blocks: torch.Tensor, quant_type: str, size: int) -> torch.Tensor:
    check_quantized_size(size)
    if blocks.shape[1] != block_row_bytes(quant_type, size):
        raise ValueError(
            f"{blocks.shape[1]} bytes a column are not {size} values in {quant_type}"
        )
    return blocks.contiguous()


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    check_quantized_size(weight.shape[1])
    values, scales = quantize_int8(weight.float())
    # [N, 4 + K]: the scale's bytes, then the values.
    return torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), dim=1)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values of x's shape, and a float32 scale for its last dimension.

    A scale is NaN where a value is NaN or infinite, and 0 where all are next to 0.
    """
    largest = x.abs().amax(-1, keepdim=True)
    is_zero = largest < _SMALLEST_RANGE
    scale = torch.where(is_zero, 0.0, largest / 127.0)
    inverse = torch.where(is_zero, 0.0, 127.0 / largest)
    # round() takes ties to the even number.
    values = (x * inverse).nan_to_num(0.0).round().to(torch.int8)
    return values, torch.where(largest.isfinite(), scale, torch.nan)


def quantized_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    values, scales, minima = _unpack_quantized(packed, quant_type)
    if values.shape[0] != num_columns or values[0].numel() != x.shape[1]:
        raise ValueError(
            f"the weight has {values.shape[0]} columns of {values[0].numel()}, not "
            f"{num_columns} of {x.shape[1]}"
        )
    # [M, blocks, block]; int8 is one block a row.
    x_values, x_scales = quantize_int8(x.float().unflatten(1, values.shape[1:]))
    # Sums of a block are whole numbers that double precision holds.
    sums = torch.einsum("mbk,nbk->mnb", x_values.double(), values.double())
    result = (sums * (x_scales.mT * scales[None]).double()).sum(-1)
    x_sums = x_scales[..., 0] * x_values.sum(-1)
    result = result.float() + torch.einsum("mb,nb->mn", x_sums, minima)
    return (result if bias is None else result + bias).to(x.dtype)


def linear_argmax(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return _first_largest(_products(x, packed, quant_type, num_columns, bias))


def linear_statistics(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None,
    listed_rows: torch.Tensor,
    count: int,
    written_rows: torch.Tensor,
) -> LinearStatistics:
    products = _products(x, packed, quant_type, num_columns, bias)
    listed = products[listed_rows].float()
    # torch sorts NaN before all numbers.
    is_nan = listed.isnan()
    by_value = listed.masked_fill(is_nan, float("-inf"))
    ids = by_value.argsort(dim=-1, descending=True, stable=True)
    is_last = is_nan.gather(1, ids).to(torch.uint8)
    ids = ids.gather(1, is_last.argsort(dim=-1, stable=True))[:, :count]
    return LinearStatistics(
        _first_largest(products),
        ids,
        listed.gather(1, ids),
        listed.logsumexp(-1),
        products[written_rows].float(),
    )


def _products(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if quant_type == "float32":
        return packed_linear(x, packed, num_columns, bias)
    return quantized_linear(x, packed, quant_type, num_columns, bias)


def quantized_rows(
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    size: int,
    ids: torch.Tensor,
) -> torch.Tensor:
    selected = quantized_select(packed, quant_type, num_columns, size, ids)
    values, scales, minima = _unpack_quantized(selected, quant_type)
    rows = values * scales[..., None] + minima[..., None]
    return rows.reshape(-1, size)


def quantized_select(
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    size: int,
    ids: torch.Tensor,
) -> torch.Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_columns:
        raise IndexError(f"a row is not in [0, {num_columns})")
    return packed[ids]


def _unpack_quantized(
    packed: torch.Tensor, quant_type: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [N, blocks, block], scales and minima [N, blocks], in float32."""
    num_columns = packed.shape[0]
    if quant_type == "int8":
        values = packed[:, 4:].contiguous().view(torch.int8)
        scales = packed[:, :4].contiguous().view(torch.float32)
        return values[:, None].float(), scales, torch.zeros_like(scales)
    header = _HEADER_BYTES[quant_type]
    block_bytes = header + (_BLOCK if quant_type == "Q8_0" else _BLOCK // 2)
    blocks = packed.reshape(num_columns, -1, block_bytes)
    numbers = blocks[..., :header].contiguous().view(torch.float16).float()
    scales = numbers[..., 0]
    minima = numbers[..., 1] if header == 4 else torch.zeros_like(scales)
    raw = blocks[..., header:].contiguous()
    if quant_type == "Q8_0":
        return raw.view(torch.int8).float(), scales, minima
    # The first half of a block is in the low bits.
    values = torch.cat((raw & 15, raw >> 4), dim=-1).float() - _OFFSETS[quant_type]
    return values, scales, minima


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale).to(x.dtype) * weight
    return normed if out is None else out.copy_(normed)


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
    keys[block_ids, :, offsets, :head_size] = cast_to_cache(
        key[is_stored], kv_cache.dtype
    )
    stored_values = F.pad(value[is_stored], (0, kv_cache.shape[4] - head_size))
    values[block_ids, :, offsets] = cast_to_cache(
        stored_values, kv_cache.dtype
    ).unflatten(-1, values.shape[3:])


def cast_to_cache(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in the dtype of a cache.

    What is beyond the dtype's largest finite number becomes that, not infinite; NaN
    stays NaN.
    """
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    # In float32: bfloat16 has no number that is float16's largest.
    return x.float().clamp(-limit, limit).to(dtype)


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
            x.transpose(0, 1).flatten(1, 2)[:, :seq_len, :head_size]
            for x in (keys[blocks], values[blocks].flatten(3))
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
    # A weight of zero does not hide what is no number, hence only the scores have any:
    # a row that sees such a key has no number either.
    is_number = value.float().isfinite()
    scores = scores.masked_fill(~is_number.all(-1)[:, None], float("nan"))
    if is_causal:
        positions = torch.arange(seq_len, device=query.device)
        is_future = positions > positions[seq_len - query_len :, None]
        scores = scores.masked_fill(is_future, float("-inf"))
    value = value.float().where(is_number, 0.0)
    out = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), value)
    return out.to(query.dtype)


def _cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys as [num_blocks, num_kv_heads, block_size, width], and values.

    Of the values' five dimensions the last two are the width.
    """
    block_size, width = kv_cache.shape[3:]
    panel = 16 if width % 32 else 32
    keys, values = kv_cache.flatten(3).unbind(1)
    return (
        keys.unflatten(2, (width, block_size)).transpose(2, 3),
        values.unflatten(2, (width // panel, block_size, panel)).transpose(2, 3),
    )


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
    return _first_largest(scores)


def _first_largest(scores: torch.Tensor) -> torch.Tensor:
    """Return each row's argmax, the first of equals; -1 where all are NaN or -inf."""
    is_candidate = scores > float("-inf")
    scores = scores.masked_fill(~is_candidate, float("-inf"))
    # torch's argmax does not promise the first.
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
