"""The DSpark drafter with layers like Qwen3's, or like Llama's.

Source: "DSpark", arXiv:2607.05147. The target's states enter as keys and values only.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from vllm._cpu_ops_drafter import (
    BlockDrafterWeights,
    BlockDraws,
    ContextPiece,
    ContextWeights,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.context_kv import ContextKV, join_pieces
from vllm.model_executor.layers.dense_decoder import (
    DecoderLayer,
    DecoderLayers,
    SelfAttention,
)
from vllm.model_executor.layers.draft_vocab import DraftVocab
from vllm.model_executor.layers.dspark_heads import ConfidenceHead, MarkovHead
from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.quantization.methods import (
    UNQUANTIZED,
    QuantizationMethod,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.transformers_utils.configs.dspark import DSparkConfig
from vllm.v1.attention.backend import AttentionBackend, BlockDrafter, ContextWriter
from vllm.v1.kv_cache_interface import FullAttentionSpec


class DSparkModel(Layer):
    """Drafts a block of tokens in one pass, then corrects them from left to right.

    R requests, K = `config.num_draft_tokens`, Q = `config.block_size`, or fewer of both
    where the drafter allows short blocks. A round is
    `combine_hidden_states` and `write_context_kv` for the tokens that were verified,
    `forward` for a block of every request, and for each draft k of the K in turn
    `markov_embed`, `markov_bias` and a draw; `compute_confidence` when all are drawn,
    or before: it never reads the draft that it judges. `write_context` and
    `maybe_draft` do as much in one operation each, where the backend has it.

    Args:
        config: of the drafter.
        num_positions: absolute positions 0 .. num_positions - 1 are asked for; a block
            that starts at the last position of the context reaches past it.
        backend: attention on the model's device.
        has_embedding: the checkpoint has a table of its own.
        has_head: the checkpoint has an output layer of its own.
        has_vocab_map: the checkpoint says which of the target's tokens it drafts.
    """

    def __init__(
        self,
        config: DSparkConfig,
        num_positions: int,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        *,
        has_embedding: bool,
        has_head: bool,
        has_vocab_map: bool,
    ) -> None:
        super().__init__()
        backbone = config.backbone
        size, eps = backbone.hidden_size, backbone.rms_norm_eps
        self.config = config
        self.dtype = dtype
        self.embed_tokens: VocabEmbedding | None = None
        if has_embedding:
            self.embed_tokens = VocabEmbedding(
                backbone.vocab_size, size, "embed_tokens", dtype
            )
        taps_size = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = Linear(taps_size, {"fc": size}, bias=False, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, "hidden_norm", dtype)
        rotary = RotaryEmbedding(backbone, num_positions)
        # Named apart from the target's layers: the caches stand side by side.
        self.layers = DecoderLayers(
            DecoderLayer(
                backbone,
                f"draft.layers.{layer_idx}",
                rotary,
                backend,
                dtype,
                has_qk_norm=backbone.architecture == "Qwen3ForCausalLM",
            )
            for layer_idx in range(backbone.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps, "norm", dtype)
        self.lm_head: Linear | None = None
        if has_head:
            self.lm_head = Linear(
                size, {"lm_head": config.draft_vocab_size}, bias=False, dtype=dtype
            )
        self.markov_head = MarkovHead(config, dtype) if config.markov_rank else None
        self.confidence_head = (
            ConfidenceHead(config) if config.enable_confidence_head else None
        )
        self.draft_vocab = (
            DraftVocab(config.draft_vocab_size, backbone.vocab_size)
            if has_vocab_map
            else None
        )
        self.context_kv: ContextKV | None = None

    @property
    def attentions(self) -> list[SelfAttention]:
        """The attention blocks, in the order of the layers."""
        return [m for m in self.modules() if isinstance(m, SelfAttention)]

    def process_weights_after_loading(
        self,
        embed_tokens: VocabEmbedding,
        lm_head: Linear,
        method: QuantizationMethod = UNQUANTIZED,
    ) -> None:
        """Lay out the weights, then share what the checkpoint left to the target.

        Args:
            embed_tokens: the target's.
            lm_head: the target's, laid out already.
            method: for the drafter's own weights, and rows that it copies.
        """
        self.context_kv = ContextKV(self.attentions)
        # One row: to round it would save nothing.
        exact = self.confidence_head and self.confidence_head.proj
        for name, module in self.named_modules():
            if module is exact:
                exact.process_weights_after_loading(UNQUANTIZED)
            elif isinstance(module, Linear):
                # Half of all that a round reads; the others lose acceptance.
                is_mlp = ".mlp." in name
                module.process_weights_after_loading(
                    method.coarse if is_mlp else method
                )
        self.embed_tokens = self.embed_tokens or embed_tokens
        if self.draft_vocab is not None:
            self.draft_vocab.process_weights_after_loading()
        if self.lm_head is None and self.config.has_reduced_vocab:
            assert self.draft_vocab is not None, "made for a reduced vocabulary"
            self.lm_head = lm_head.select(self.draft_vocab.target_ids, method)
        self.lm_head = self.lm_head or lm_head

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
        """Return what each attention layer stores, by the layer's name.

        Args:
            block_size: tokens a cache block.
            dtype: of keys and values.
        """
        return {
            module.layer_name: FullAttentionSpec(
                block_size, module.num_kv_heads, module.head_size, dtype
            )
            for module in self.modules()
            if isinstance(module, Attention)
        }

    def write_context(self, pieces: Sequence[ContextPiece]) -> None:
        """Append verified tokens to the draft cache.

        Args:
            pieces: as if each was written after the one before it; taps as for
                `combine_hidden_states`.
        """
        if self._fused_writer is None:
            whole = join_pieces(pieces)
            fused = self.combine_hidden_states(whole.taps)
            self.write_context_kv(fused, whole.positions, whole.slot_mapping)
        else:
            self._fused_writer(pieces, self._list_kv_caches())

    def combine_hidden_states(self, taps: list[torch.Tensor]) -> torch.Tensor:
        """Fuse the target's states of each token.

        Args:
            taps: [T, target_hidden_size] each, in the order of `target_layer_ids`.

        Returns:
            [T, hidden_size], shared by all draft layers.
        """
        return self.hidden_norm(self.fc(torch.cat(taps, dim=-1)))

    def write_context_kv(
        self,
        fused: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> None:
        """Append verified tokens to the draft cache.

        Args:
            fused: [T, hidden_size], from `combine_hidden_states`.
            positions: [T] int64, absolute.
            slot_mapping: [T] int64; -1 for a token that is no context. None: nothing is
                written.
        """
        assert self.context_kv is not None, "weights are loaded"
        self.context_kv(fused, positions, slot_mapping)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run one block of every request over its context in the draft cache.

        The block's own keys and values go to the slots after the context, where the
        next tokens of the context overwrite them.

        Args:
            input_ids: [R * Q] int64, an anchor and then mask tokens.
            positions: [R * Q] int64, absolute; p .. p + Q - 1 for an anchor at p.

        Returns:
            [R, K, hidden_size], the states that the drafts are read from.
        """
        metadata = get_forward_context().attn_metadata
        block_size = self.config.block_size
        if metadata is not None:
            assert not metadata.is_causal, "a block sees all of itself"
            block_size = metadata.max_query_len
        assert (
            self.config.allows_short_blocks or block_size == self.config.block_size
        ), "blocks are run at the size they were trained at: verify less instead"
        assert self.embed_tokens is not None, "weights are loaded"
        stream = self.embed_tokens(input_ids)
        self.layers.run(positions, stream)
        x = self.norm(stream)
        # Without drafts from the anchor's slot, its state predicts nothing.
        first = self.config.num_silent_slots
        return x.view(-1, block_size, x.shape[-1])[:, first:]

    def maybe_draft(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        num_drafts: torch.Tensor,
        num_steps: int,
        max_reqs_at_once: int,
        draws: BlockDraws | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a block of every request and draft from it, in one operation.

        Args:
            input_ids: as for `forward`.
            positions: as for `forward`.
            num_drafts: [R] int32, that a request can have.
            num_steps: at most K.
            max_reqs_at_once: whose logits may exist at once.
            draws: None takes the likeliest tokens.

        Returns:
            ids: [R, num_steps] int64, the target's; -1 past num_drafts.
            scores: [R, num_steps] float32, as `compute_confidence`.
            None if there is no such operation.
        """
        metadata = get_forward_context().attn_metadata
        if self._fused_drafter is None or metadata is None:
            return None
        return self._fused_drafter(
            input_ids,
            positions,
            self._list_kv_caches(),
            metadata,
            num_drafts,
            num_steps,
            max_reqs_at_once,
            draws,
        )

    def _list_kv_caches(self) -> list[torch.Tensor]:
        kv_caches = get_forward_context().kv_caches
        return [kv_caches[name] for name in self._cache_names]

    def compute_base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [N, draft_vocab_size] float32, of states [N, hidden_size]."""
        assert self.lm_head is not None, "weights are loaded"
        return self.lm_head(hidden).float()

    def initial_markov_state(
        self, num_reqs: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the Markov head's memory at a block's start.

        Args:
            like: a tensor of the dtype and device to make it in.
        """
        if self.markov_head is None:
            return None
        return self.markov_head.initial_state(num_reqs, like)

    def markov_embed(self, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Return [R, rank] of the target's ids [R] that precede a draft, if used."""
        if self.markov_head is None:
            return None
        return self.markov_head.markov_w1(previous_ids)

    def markov_bias(
        self,
        embedding: torch.Tensor | None,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what the token before a draft adds to its logits, and the next state.

        Args:
            embedding: [R, rank], from `markov_embed`.
            hidden: [R, hidden_size], the draft's.
            state: from `initial_markov_state` or the draft before.

        Returns:
            bias: [R, draft_vocab_size] float32; None without such a head.
            state: for the next draft.
        """
        if self.markov_head is None:
            return None, None
        return self.markov_head(embedding, hidden, state)

    @property
    def can_walk(self) -> bool:
        """Whether `walk` does all that a block's most likely drafts need."""
        head = self.markov_head
        return head is not None and head.is_bigram and self.confidence_head is not None

    def walk(
        self, base_logits: torch.Tensor, anchor_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely drafts, each knowing the one before.

        Args:
            base_logits: [K, R, draft_vocab_size] float32.
            anchor_ids: [R] int64.

        Returns:
            ids: [R, K] int64, the target's.
            embeddings: [R, K, rank], as `markov_embed` of the token before each.
        """
        assert self.markov_head is not None, "there is nothing between drafts"
        column_ids = None if self.draft_vocab is None else self.draft_vocab.target_ids
        return self.markov_head.walk(base_logits, anchor_ids, column_ids)

    def compute_confidence(
        self, hidden: torch.Tensor, embedding: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return calibrated logits of each draft's acceptance, given those before it.

        Args:
            hidden: [R, K, hidden_size].
            embedding: [R, K, rank], of the token before each draft.

        Returns:
            [R, K] float32; None without such a head.
        """
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden, embedding)

    @cached_property
    def _cache_names(self) -> tuple[str, ...]:
        return tuple(attention.attn.layer_name for attention in self.attentions)

    @cached_property
    def _fused_writer(self) -> ContextWriter | None:
        """The context as one operation; asked for when the weights are laid out."""
        assert self.context_kv is not None, "weights are loaded"
        attention = self.attentions[0]
        fc, kv = self.fc.compiled_weights(), self.context_kv.proj.compiled_weights()
        if fc is None or kv is None:
            return None
        norms = [attention.k_norm for attention in self.attentions]
        weights = ContextWeights(
            fc=fc,
            hidden_norm=self.hidden_norm.weight,
            eps=self.hidden_norm.eps,
            kv=kv,
            k_norms=tuple(None if norm is None else norm.weight for norm in norms),
            cos_sin_cache=attention.rotary.cos_sin_cache,
            num_kv_heads=attention.attn.num_kv_heads,
            head_size=attention.head_dim,
        )
        return attention.attn.backend.maybe_fuse_context_writer(weights)

    @cached_property
    def _fused_drafter(self) -> BlockDrafter | None:
        """Blocks and drafts as one operation; None for other heads as well."""
        markov, confidence = self.markov_head, self.confidence_head
        if markov is None or not markov.is_bigram or confidence is None:
            return None
        assert self.embed_tokens is not None, "weights are loaded"
        assert self.lm_head is not None, "weights are loaded"
        embedding = self.embed_tokens.compiled_table()
        bigrams = markov.markov_w1.compiled_table()
        layers = self.layers.compiled_weights()
        head = self.lm_head.compiled_weights()
        bigram_head = markov.markov_w2.compiled_weights()
        proj = confidence.proj.compiled_weights()
        if embedding is None or bigrams is None or layers is None:
            return None
        if head is None or bigram_head is None or proj is None:
            return None
        vocab = self.draft_vocab
        weights = BlockDrafterWeights(
            embedding=embedding,
            layers=layers,
            norm=self.norm.weight,
            eps=self.norm.eps,
            head=head,
            bigrams=bigrams,
            bigram_head=bigram_head,
            confidence=proj,
            temperatures=confidence.temperatures,
            column_ids=None if vocab is None else vocab.target_ids,
            first_slot=self.config.num_silent_slots,
        )
        backend = self.attentions[0].attn.backend
        return backend.maybe_fuse_block_drafter(weights)
