"""The CPU operators by name: the compiled one where it is built, else its torch twin.

The compiled operators take float32 tensors on the CPU. They keep one law: the bits of a
row of the result depend on that row alone, never on the rows beside it, their number,
the number of threads or the instruction set. The twins (`_cpu_ops_torch`) have the same
meaning, any device and dtype, and torch's own rounding.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from vllm import _cpu_ops_torch
from vllm._cpu_ops_budget import BudgetOps
from vllm._cpu_ops_decoder import DecoderLayerWeights, FusedLayers
from vllm._cpu_ops_drafter import (
    BlockDrafterWeights,
    ContextWeights,
    FusedBlockDrafter,
    FusedContextWriter,
)
from vllm._cpu_ops_native import NativeOps, maybe_load_native_ops
from vllm._cpu_ops_step import StepOps
from vllm._cpu_ops_torch import LinearStatistics

# The longest list of columns that `linear_statistics` gives.
MAX_LISTED = 64

_native: NativeOps | None = maybe_load_native_ops()


def has_cpu_ops() -> bool:
    """Whether the compiled operators are built, run here, and are not switched off."""
    return _native is not None


def maybe_step_ops() -> StepOps | None:
    """Return the compiled operators whose twins stand beside their Triton kernels."""
    return _native


def maybe_budget_ops() -> BudgetOps | None:
    """Return the compiled operators that a draft budget is chosen with."""
    return _native


def _pick(x: torch.Tensor) -> NativeOps | ModuleType:
    if _native is None or x.dtype is not torch.float32 or not x.is_cpu:
        return _cpu_ops_torch
    return _native


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out for `packed_linear`; opaque, made once, at load.

    Args:
        weight: [N, K].

    Returns:
        One-dimensional where the compiled operator will read it, else [N, K].
    """
    return _pick(weight).pack_weight(weight)


def packed_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    num_columns: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [M, K], rows may be strided.
        packed: from `pack_weight`.
        num_columns: N.
        bias: [N].

    Returns:
        [M, N].

    Raises:
        ValueError: the packed weight has other sizes.
    """
    if packed.dim() == 2:
        return _cpu_ops_torch.packed_linear(x, packed, num_columns, bias)
    assert _native is not None, "packed by the compiled operator, which is gone"
    return _native.packed_linear(x, packed, num_columns, bias)


def pack_blocks(blocks: torch.Tensor, quant_type: str, size: int) -> torch.Tensor:
    """Lay GGUF blocks out for `quantized_linear`; opaque, made once, at load.

    Args:
        blocks: [N, bytes of a row] uint8, as in the file.
        quant_type: Q4_0, Q4_1 or Q8_0.
        size: K, a multiple of 32.

    Returns:
        uint8, one-dimensional where the compiled operators will read it, else [N, ...].

    Raises:
        ValueError: a row has other bytes, or no values.
    """
    ops = _cpu_ops_torch if _native is None or not blocks.is_cpu else _native
    return ops.pack_blocks(blocks, quant_type, size)


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight to int8, one scale a row of it, for `quantized_linear`.

    Args:
        weight: [N, K].

    Returns:
        As `pack_blocks`; the quantisation type is int8.

    Raises:
        ValueError: a row has no values.
    """
    return _pick(weight).pack_int8(weight)


def quantized_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, with x rounded to int8 as well.

    x has one scale for each block of 32 values of a row, or one a row where the type is
    int8: the largest magnitude / 127. Products are summed as integers, exactly.

    Args:
        x: [M, K], rows may be strided.
        packed: from `pack_blocks` or `pack_int8`.
        quant_type: of the weight: Q4_0, Q4_1, Q8_0 or int8.
        num_columns: N.
        bias: [N].

    Returns:
        [M, N]; a row with a value that is not finite is NaN.

    Raises:
        ValueError: the packed weight has other sizes.
    """
    ops = _packer(packed)
    return ops.quantized_linear(x, packed, quant_type, num_columns, bias)


def linear_argmax(
    x: torch.Tensor,
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the column of each row's largest product, which is not written.

    The products are, bit for bit, those of `quantized_linear`, or of `packed_linear`.
    Ties go to the lowest column; NaN and -inf are never chosen.

    Args:
        x: [M, K], rows may be strided.
        packed: from `pack_weight`, `pack_blocks` or `pack_int8`.
        quant_type: of the weight; float32 if it is from `pack_weight`.
        num_columns: N.
        bias: [N].

    Returns:
        [M] int64; -1 where no product is above -inf.

    Raises:
        ValueError: the packed weight has other sizes.
    """
    return _packer(packed).linear_argmax(x, packed, quant_type, num_columns, bias)


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
    """Return what samplers need to know of products, few of which are written.

    The products are those of `linear_argmax`; of `logsumexp`, the bits are those that
    `logprob_stats` gives for them. Of equal products the lower column comes first; NaN
    comes last, after -inf.

    Args:
        x: [M, K], rows may be strided.
        packed: from `pack_weight`, `pack_blocks` or `pack_int8`.
        quant_type: of the weight; float32 if it is from `pack_weight`.
        num_columns: N.
        bias: [N].
        listed_rows: [n] int64, increasing; of which the largest products are wanted.
        count: columns of each of these rows, 1 to MAX_LISTED and at most N.
        written_rows: [m] int64, increasing; of which all products are wanted.

    Raises:
        ValueError: the packed weight has other sizes.
        IndexError: there are no such rows, or not so many columns.
    """
    return _packer(packed).linear_statistics(
        x, packed, quant_type, num_columns, bias, listed_rows, count, written_rows
    )


def quantized_rows(
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    size: int,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return rows of a quantised weight, in float32.

    Args:
        packed: from `pack_blocks` or `pack_int8`.
        quant_type: of the weight.
        num_columns: N.
        size: K.
        ids: [n] int64.

    Returns:
        [n, K].

    Raises:
        IndexError: there is no such row.
        ValueError: the packed weight has other sizes.
    """
    return _packer(packed).quantized_rows(packed, quant_type, num_columns, size, ids)


def quantized_select(
    packed: torch.Tensor,
    quant_type: str,
    num_columns: int,
    size: int,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return a weight of some rows of a quantised one, no bit of them changed.

    Args:
        packed: from `pack_blocks` or `pack_int8`.
        quant_type: of the weight.
        num_columns: N.
        size: K.
        ids: [n] int64.

    Returns:
        As `packed`, with n columns.

    Raises:
        IndexError: there is no such row.
        ValueError: the packed weight has other sizes.
    """
    return _packer(packed).quantized_select(packed, quant_type, num_columns, size, ids)


def _packer(packed: torch.Tensor) -> NativeOps | ModuleType:
    """Return the operators that laid a weight out."""
    if packed.dim() == 2:
        return _cpu_ops_torch
    assert _native is not None, "packed by the compiled operator, which is gone"
    return _native


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale every row to a root mean square of one, then by `weight`.

    Args:
        x: [T, D], or [T, H, D] for a norm over heads; rows may be strided.
        weight: [D].
        eps: added to the mean square.
        out: where to write, of x's shape; may be x. None makes a new tensor.

    Returns:
        The tensor written.
    """
    return _pick(x).rms_norm(x, weight, eps, out)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of every row.

    Args:
        x: [T, 2 * I].

    Returns:
        [T, I].
    """
    return _pick(x).silu_and_mul(x)


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_dim: int,
) -> None:
    """Rotate the halves of every head by its token's position, in place.

    Args:
        positions: [T] int64.
        q: [T, num_heads * head_dim], may be a slice of columns; or [T, heads, dim].
        k: [T, num_kv_heads * head_dim], as q.
        cos_sin_cache: [num_positions, rotary_dim], cosines then sines; dimensions of a
            head past rotary_dim stay.
        head_dim: width of a head.

    Raises:
        IndexError: a position is outside the cache.
    """
    _pick(q).rotary_embedding(positions, q, k, cos_sin_cache, head_dim)


def cpu_kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of one layer's cache for the two functions below.

    Its dtype is float32 or float16. Keys and values are in float32 all the same where
    they are multiplied, and so are their sums.

    In [:, 0] a block holds its keys transposed, [width, block_size] in the memory of
    [block_size, width]; in [:, 1] its values, as [width // panel, block_size, panel].
    The width is the head size rounded up to 16, a panel 32 columns, or 16 where the
    width is no multiple of 32.
    """
    return num_blocks, 2, num_kv_heads, block_size, -(-head_size // 16) * 16


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store keys and values in their slots.

    Args:
        key: [T, num_kv_heads, head_size], tokens may be strided.
        value: as key.
        kv_cache: of `cpu_kv_cache_shape`, changed in place. Of float16, it takes what
            is beyond its largest finite number as that; NaN stays NaN.
        slot_mapping: [T] int64, block id * block size + offset; -1 writes nothing.

    Raises:
        IndexError: a slot is outside the cache.
    """
    _pick(key).reshape_and_cache(key, value, kv_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    is_causal: bool = True,
) -> None:
    """Attend over the paged cache in order of absolute position.

    Args:
        query: [T, num_heads, head_size], tokens may be strided.
        kv_cache: of `cpu_kv_cache_shape`; block size a multiple of 16.
        block_table: [num_reqs, max_blocks] int32.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32, keys of each request, its query tokens included.
        scale: of the scores.
        out: of the query's shape, written.
        is_causal: False lets a query see every key of its request.

    Raises:
        IndexError: a block id is outside the cache.
    """
    _pick(query).paged_attention(
        query, kv_cache, block_table, query_start_loc, seq_lens, scale, out, is_causal
    )


def fuse_decoder_layers(layers: Sequence[DecoderLayerWeights]) -> FusedLayers | None:
    """Return decoder layers that run in one call; None without the compiled operators.

    There is no twin: what they compute is what the single operators compute.

    Args:
        layers: of one shape, packed by the compiled operators.

    Raises:
        ValueError: sizes do not belong together.
    """
    return None if _native is None else FusedLayers(_native, layers)


def fuse_context_writer(weights: ContextWeights) -> FusedContextWriter | None:
    """Return what writes a drafter's context in one call; else as the layers above."""
    return None if _native is None else FusedContextWriter(_native, weights)


def fuse_block_drafter(weights: BlockDrafterWeights) -> FusedBlockDrafter | None:
    """Return what drafts from blocks in one call; else as the layers above."""
    return None if _native is None else FusedBlockDrafter(_native, weights)


def philox_uniform(keys: torch.Tensor, num: int) -> torch.Tensor:
    """Return tl.rand(key, offset) for the offsets 0..num - 1 of every key.

    Args:
        keys: [N] int64.
        num: draws a key.

    Returns:
        [N, num] float32 in [0, 1).
    """
    ops = _cpu_ops_torch if _native is None or not keys.is_cpu else _native
    return ops.philox_uniform(keys, num)


def gumbel_argmax(
    logits: torch.Tensor, keys: torch.Tensor, is_greedy: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw a token of every row: the argmax of logit plus Gumbel noise.

    With u = max(tl.rand(key, token id), 2^-33) a token's score is, in double precision,
    logit - log(-log1p(-u)). The largest score wins, the lowest id among equals. Tokens
    at -inf or NaN are never drawn.

    Args:
        logits: [N, vocab_size] float32, temperature applied.
        keys: [N] int64.
        is_greedy: [N] uint8 or bool; set rows take the plain argmax.

    Returns:
        [N] int64; -1 where no logit is above -inf.
    """
    return _pick(logits).gumbel_argmax(logits, keys, is_greedy)


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> None:
    """Set to -inf, in place, what top-k and then top-p leave out.

    Every logit equal to the k-th largest stays. Of what is left, a token stays if the
    probabilities of the strictly more likely ones sum to less than p; one always stays.
    Rows that are filtered lose their NaN too.

    Args:
        logits: [N, vocab_size] float32.
        k: [N] int32; 0 leaves a row unchanged.
        p: [N] float32; 1 leaves a row unchanged.
    """
    _pick(logits).top_k_top_p(logits, k, p)


def logprob_stats(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what turns a token's logit into its log-probability and rank.

    Args:
        logits: [N, vocab_size] float32.
        token_ids: [N] int64.

    Returns:
        logsumexp: [N] float32.
        rank: [N] int32, 1 + the number of logits strictly above the token's.

    Raises:
        IndexError: a token id is outside the vocabulary.
    """
    return _pick(logits).logprob_stats(logits, token_ids)


def apply_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor
) -> None:
    """Set to -inf, in place, every token whose bit is 0.

    Args:
        logits: [N, vocab_size] float32.
        bitmask: [M, ceil(vocab_size / 32)] int32, token 0 in the lowest bit.
        rows: [M] int32, the row of logits that a mask is for; -1 for none.

    Raises:
        IndexError: a mask's row is outside the logits.
    """
    _pick(logits).apply_bitmask(logits, bitmask, rows)
