"""A drafter of blocks in two calls of the compiled CPU operators: context, and drafts.

A round of one request computes for a millisecond, and as long again are the dozens of
operations that it is made of; so the weights are described to the compiled side once,
as in `_cpu_ops_decoder`. What is computed is, bit for bit, what the single operators
compute.
"""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from vllm._cpu_ops_decoder import (
    CacheAddresses,
    DecoderLayerWeights,
    FusedLayers,
    Linear,
    LinearDescriptions,
    LinearWeights,
    address_of,
    raise_if_outside,
)
from vllm._cpu_ops_native import NativeOps


@dataclass(frozen=True)
class TableWeights:
    """A row a token.

    Args:
        rows: [num_rows, size] float32, or a weight from `pack_blocks` or `pack_int8`.
        quant_type: of the weight; float32 for plain rows.
        num_rows: tokens.
        size: of a row.
    """

    rows: torch.Tensor
    quant_type: str
    num_rows: int
    size: int


@dataclass(frozen=True)
class ContextWeights:
    """What turns the target's states into keys and values of a drafter's layers.

    Args:
        fc: of the taps of a token side by side.
        hidden_norm: [hidden_size], of what fc gives.
        eps: of all norms.
        kv: of the keys of all layers and then the values of all.
        k_norms: [head_size] a layer, of every key head; None without.
        cos_sin_cache: [num_positions, rotary_dim], as `rotary_embedding` takes it.
        num_kv_heads: of a layer.
        head_size: of all heads.
    """

    fc: LinearWeights
    hidden_norm: torch.Tensor
    eps: float
    kv: LinearWeights
    k_norms: tuple[torch.Tensor | None, ...]
    cos_sin_cache: torch.Tensor
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True)
class ContextPiece:
    """Tokens that the target has computed, and a drafter has not read.

    Args:
        taps: [T, target_hidden_size] each, the target's states.
        positions: [T] int64, as the drafter rotates by them.
        slot_mapping: [T] int64; -1 for a token that is not to be written, whatever its
            position is.
    """

    taps: list[torch.Tensor]
    positions: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class BlockDrafterWeights:
    """A drafter whose drafts know the token before by a low-rank bigram table.

    Args:
        embedding: of the tokens, as wide as the layers.
        layers: of one shape.
        norm: [hidden_size], before the heads.
        eps: of it.
        head: logits of the columns.
        bigrams: of the token before a draft.
        bigram_head: what a row of `bigrams` adds to the logits.
        confidence: one output, of a state, or of it and the row of `bigrams`.
        temperatures: [num_draft_tokens], by which confidences are divided.
        column_ids: [columns] int64, the tokens that they stand for; None: their own.
        first_slot: of a block, that the first draft is read from.
    """

    embedding: TableWeights
    layers: Sequence[DecoderLayerWeights]
    norm: torch.Tensor
    eps: float
    head: LinearWeights
    bigrams: TableWeights
    bigram_head: LinearWeights
    confidence: LinearWeights
    temperatures: torch.Tensor
    column_ids: torch.Tensor | None
    first_slot: int


@dataclass(frozen=True)
class BlockDraws:
    """How drafts are drawn, and where what they were drawn from is kept.

    Args:
        idx_mapping: [R] int32, row -> request row.
        temperature: [max_num_reqs] float32.
        keys: [K, R] int64, of the noise.
        is_greedy: [R] uint8.
        logits: [max_num_reqs, K, vocab_size] float32, changed: at a request's row, of
            the tokens that can be drafted.
    """

    idx_mapping: torch.Tensor
    temperature: torch.Tensor
    keys: torch.Tensor
    is_greedy: torch.Tensor
    logits: torch.Tensor


class FusedContextWriter:
    """Writes a drafter's context in one call.

    Args:
        ops: that packed the weights.
        weights: of the drafter.

    Raises:
        ValueError: sizes do not belong together.
    """

    def __init__(self, ops: NativeOps, weights: ContextWeights) -> None:
        self._ops = ops
        # The weights live as long as their addresses are known.
        self._weights = weights
        self._linears = LinearDescriptions(ops)
        num_layers, head_size = len(weights.k_norms), weights.head_size
        hidden_size = weights.kv.size
        num_positions, rotary_dim = weights.cos_sin_cache.shape
        if rotary_dim > head_size:
            raise ValueError(f"cannot rotate {rotary_dim} of {head_size} dimensions")
        kv_size = weights.num_kv_heads * head_size
        self._caches = CacheAddresses(num_layers, weights.num_kv_heads, head_size)
        self._k_norms = (c_void_p * num_layers)(
            *(
                None if norm is None else address_of(norm, (head_size,))
                for norm in weights.k_norms
            )
        )
        self._writer = _ContextWriter(
            self._linears.describe(weights.fc, weights.fc.size, hidden_size),
            self._linears.describe(weights.kv, hidden_size, 2 * num_layers * kv_size),
            address_of(weights.hidden_norm, (hidden_size,)),
            addressof(self._k_norms),
            address_of(weights.cos_sin_cache, (num_positions, rotary_dim)),
            num_positions,
            rotary_dim,
            num_layers,
            weights.num_kv_heads,
            head_size,
            weights.eps,
        )

    def run(
        self, pieces: Sequence[ContextPiece], kv_caches: Sequence[torch.Tensor]
    ) -> None:
        """Write keys and values of all layers.

        Args:
            pieces: in their order, with float32 taps; the last token of a slot is
                written, and the others are not computed.
            kv_caches: of all layers, of one `cpu_kv_cache_shape` and dtype.

        Raises:
            IndexError: a position or slot is outside; nothing was changed.
            ValueError: shapes do not belong together.
        """
        num_pieces, num_taps = len(pieces), len(pieces[0].taps)
        tap_size = self._weights.fc.size // num_taps
        if tap_size * num_taps != self._weights.fc.size:
            raise ValueError(f"{num_taps} taps for {self._weights.fc.size} inputs")
        self._caches.bind(kv_caches)
        num_blocks, _, _, block_size, _ = kv_caches[0].shape
        sizes, taps, positions, slots = [], [], [], []
        for piece in pieces:
            (num_tokens,) = shape = piece.positions.shape
            if len(piece.taps) != num_taps:
                raise ValueError(f"{len(piece.taps)} taps behind {num_taps}")
            sizes.append(num_tokens)
            taps += [address_of(tap, (num_tokens, tap_size)) for tap in piece.taps]
            positions.append(address_of(piece.positions, shape, torch.int64))
            slots.append(address_of(piece.slot_mapping, shape, torch.int64))
        context = _Context(
            (c_int64 * num_pieces)(*sizes),
            (c_void_p * len(taps))(*taps),
            (c_void_p * num_pieces)(*positions),
            (c_void_p * num_pieces)(*slots),
            num_pieces,
            num_taps,
            num_blocks,
            block_size,
            kv_caches[0].dtype is torch.float16,
        )
        raise_if_outside(
            self._ops.write_context(
                addressof(self._writer), addressof(context), self._caches.address
            )
        )


class FusedBlockDrafter:
    """Runs blocks and drafts from them in one call.

    Args:
        ops: that packed the weights.
        weights: of the drafter.

    Raises:
        ValueError: sizes do not belong together.
    """

    def __init__(self, ops: NativeOps, weights: BlockDrafterWeights) -> None:
        self._ops = ops
        # The weights live as long as their addresses are known.
        self._weights = weights
        self._layers = FusedLayers(ops, weights.layers)
        self._linears = LinearDescriptions(ops)
        hidden_size = weights.layers[0].qkv.size
        rank = weights.bigrams.size
        num_columns = sum(part.num_columns for part in weights.head.parts)
        if weights.embedding.size != hidden_size:
            raise ValueError("the embedding is not as wide as the layers")
        if weights.confidence.size not in (hidden_size, hidden_size + rank):
            raise ValueError(f"confidence of {weights.confidence.size} inputs")
        column_ids, self._num_ids = None, num_columns
        if weights.column_ids is not None:
            column_ids = address_of(weights.column_ids, (num_columns,), torch.int64)
            self._num_ids = int(weights.column_ids.max()) + 1
        describe = self._linears.describe
        self._max_drafts = weights.temperatures.shape[0]
        self._drafter = _BlockDrafter(
            self._describe_table(weights.embedding),
            self._layers.address,
            len(weights.layers),
            address_of(weights.norm, (hidden_size,)),
            describe(weights.head, hidden_size, num_columns),
            self._describe_table(weights.bigrams),
            describe(weights.bigram_head, rank, num_columns),
            describe(weights.confidence, weights.confidence.size, 1),
            address_of(weights.temperatures, (self._max_drafts,)),
            column_ids,
            num_columns,
            weights.first_slot,
            weights.eps,
        )

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_drafts: torch.Tensor,
        num_steps: int,
        max_reqs_at_once: int,
        draws: BlockDraws | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft for R requests.

        Args:
            input_ids: [R * Q] int64, blocks of Q slots; each starts with its anchor.
            positions: of its shape.
            kv_caches: of all layers, of one `cpu_kv_cache_shape` and dtype.
            slot_mapping: as `reshape_and_cache` takes it.
            block_table: as `paged_attention` takes it, as the following ones.
            query_start_loc: [R + 1] int32.
            seq_lens: [R] int32.
            num_drafts: [R] int32.
            num_steps: K, at most one for each slot from `first_slot` on.
            max_reqs_at_once: bounds the logits that exist at once.
            draws: None takes the likeliest tokens.

        Returns:
            ids: [R, K] int64, of tokens; -1 past num_drafts.
            scores: [R, K] float32, confidences of all K.

        Raises:
            IndexError: a position, slot, block or token is outside.
            ValueError: shapes do not belong together.
        """
        num_tokens, num_reqs = len(positions), seq_lens.shape[0]
        num_slots, num_left = divmod(num_tokens, max(num_reqs, 1))
        if num_left or (num_tokens and not num_reqs) or positions.dim() != 1:
            raise ValueError(f"{tuple(positions.shape)} positions of {num_reqs} blocks")
        max_steps = self._max_drafts
        if num_reqs:
            max_steps = min(max_steps, num_slots - self._weights.first_slot)
        if not 0 < num_steps <= max_steps or max_reqs_at_once < 1:
            raise ValueError(f"{num_steps} drafts, {max_reqs_at_once} requests at once")
        step = self._layers.describe_step(
            positions,
            kv_caches,
            slot_mapping,
            block_table,
            query_start_loc,
            seq_lens,
            is_causal=False,
        )
        token_ids = torch.empty((num_reqs, num_steps), dtype=torch.int64)
        scores = torch.empty((num_reqs, num_steps))
        described = self._describe_draws(draws, num_reqs, num_steps)
        drafts = _Drafts(
            address_of(input_ids, (num_tokens,), torch.int64),
            address_of(num_drafts, (num_reqs,), torch.int32),
            num_steps,
            max_reqs_at_once,
            None if described is None else addressof(described),
            token_ids.data_ptr(),
            scores.data_ptr(),
        )
        raise_if_outside(
            self._ops.draft_blocks(
                addressof(self._drafter),
                addressof(step),
                self._layers.cache_addresses,
                addressof(drafts),
            )
        )
        return token_ids, scores

    def _describe_table(self, table: TableWeights) -> "_Table":
        shape = table.num_rows, table.size
        if table.quant_type == "float32":
            return _Table(_PLAIN_ROWS, address_of(table.rows, shape), *shape)
        weight_format = self._ops.check_packed(table.rows, table.quant_type, *shape)
        return _Table(weight_format, table.rows.data_ptr(), *shape)

    def _describe_draws(
        self, draws: BlockDraws | None, num_reqs: int, num_steps: int
    ) -> "_Draws | None":
        if draws is None:
            return None
        max_num_reqs, max_steps, vocab_size = draws.logits.shape
        is_whole = self._weights.column_ids is None
        fits = self._num_ids == vocab_size if is_whole else self._num_ids <= vocab_size
        if num_steps > max_steps or not fits:
            raise ValueError(f"drafts' logits of {tuple(draws.logits.shape)}")
        return _Draws(
            address_of(draws.idx_mapping, (num_reqs,), torch.int32),
            address_of(draws.temperature, (max_num_reqs,)),
            address_of(draws.keys, (num_steps, num_reqs), torch.int64),
            address_of(draws.is_greedy, (num_reqs,), torch.uint8),
            address_of(draws.logits, (max_num_reqs, max_steps, vocab_size)),
            max_steps * vocab_size,
            vocab_size,
            vocab_size,
            num_reqs,
            max_num_reqs,
        )


# The format of a table that is no weight.
_PLAIN_ROWS = -1


# The structures of csrc/cpu/api.h, field by field.
class _ContextWriter(Structure):
    _fields_ = (
        ("fc", Linear),
        ("kv", Linear),
        ("hidden_norm", c_void_p),
        ("k_norms", c_void_p),
        ("cos_sin_cache", c_void_p),
        ("num_positions", c_int64),
        ("rotary_dim", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("eps", c_float),
    )


class _Context(Structure):
    _fields_ = (
        ("num_tokens", ctypes.POINTER(c_int64)),
        ("taps", ctypes.POINTER(c_void_p)),
        ("positions", ctypes.POINTER(c_void_p)),
        ("slot_mapping", ctypes.POINTER(c_void_p)),
        ("num_pieces", c_int64),
        ("num_taps", c_int64),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("is_half", c_int64),
    )


class _Table(Structure):
    _fields_ = (
        ("format", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("size", c_int64),
    )


class _BlockDrafter(Structure):
    _fields_ = (
        ("embedding", _Table),
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("norm", c_void_p),
        ("head", Linear),
        ("bigrams", _Table),
        ("bigram_head", Linear),
        ("confidence", Linear),
        ("temperatures", c_void_p),
        ("column_ids", c_void_p),
        ("num_columns", c_int64),
        ("first_slot", c_int64),
        ("eps", c_float),
    )


class _Draws(Structure):
    _fields_ = (
        ("idx_mapping", c_void_p),
        ("temperature", c_void_p),
        ("keys", c_void_p),
        ("is_greedy", c_void_p),
        ("logits", c_void_p),
        ("req_stride", c_int64),
        ("step_stride", c_int64),
        ("vocab_size", c_int64),
        ("num_reqs", c_int64),
        ("max_num_reqs", c_int64),
    )


class _Drafts(Structure):
    _fields_ = (
        ("input_ids", c_void_p),
        ("num_drafts", c_void_p),
        ("num_steps", c_int64),
        ("max_reqs_at_once", c_int64),
        ("draws", c_void_p),
        ("token_ids", c_void_p),
        ("scores", c_void_p),
    )
