"""The drafter in plain torch, many blocks of a sequence at once, to be differentiated.

The names of its parameters are those of a checkpoint. What the engine runs is
`model_executor/models/qwen3_dspark.py`; both must give the same states.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.layers.rotary_embedding import build_cos_sin_cache
from vllm.transformers_utils.config import HfConfig
from vllm.transformers_utils.configs.dspark import DSparkConfig

# Of the table of predecessors; of a matrix, 1 / sqrt(its inputs).
_TABLE_DEVIATION = 0.02


class DSparkTrainingModel(nn.Module):
    """N sequences of S tokens, B blocks of Q slots a sequence, K drafts a block.

    Args:
        config: of the drafter.
        num_positions: absolute positions 0 .. num_positions - 1 are used.
        embedding: [vocab_size, hidden_size], the target's, frozen.
        head: [draft_vocab_size, hidden_size], rows of the target's output layer for
            what can be drafted, frozen.
        seed: of the initial weights.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    cos_sin: torch.Tensor
    tap_scales: torch.Tensor | None

    def __init__(
        self,
        config: DSparkConfig,
        num_positions: int,
        embedding: torch.Tensor,
        head: torch.Tensor,
        seed: int = 0,
    ) -> None:
        super().__init__()
        assert not config.is_rope_interleaved, "trained with rotation of halves"
        backbone = config.backbone
        size = backbone.hidden_size
        self.config = config
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("head", head.detach(), persistent=False)
        cos_sin = build_cos_sin_cache(backbone, num_positions)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.register_buffer("tap_scales", None, persistent=False)
        taps_size = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(taps_size, size, bias=False)
        self.hidden_norm = _RMSNorm(size, backbone.rms_norm_eps)
        self.layers = nn.ModuleList(
            _DraftLayer(backbone) for _ in range(backbone.num_hidden_layers)
        )
        self.norm = _RMSNorm(size, backbone.rms_norm_eps)
        self.markov_head = _MarkovHead(config) if config.markov_rank else None
        self.confidence_head = (
            _ConfidenceHead(config) if config.enable_confidence_head else None
        )
        self._initialise(seed)

    @property
    def draft_layers(self) -> list["_DraftLayer"]:
        """The layers, by their type."""
        return [layer for layer in self.layers if isinstance(layer, _DraftLayer)]

    def forward(
        self, taps: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, B, K, hidden_size], the states that drafts are read from.

        Args:
            taps: [N, S, number of taps * target_hidden_size], of the tokens at
                positions 0 .. S - 1; those at or after a block's anchor are not seen.
            input_ids: [N, B, Q] int64.
            positions: [N, B, Q] int64, absolute; the first is the anchor's.
        """
        if self.tap_scales is not None:
            taps = taps * self.tap_scales
        context = self.hidden_norm(self.fc(taps))
        num_tokens = context.shape[1]
        # [N, 1, 1, B, 1, S], as the scores are laid out.
        is_seen = torch.arange(num_tokens, device=taps.device) < positions[..., :1]
        is_seen = is_seen[:, None, None, :, None]
        rotations = self.cos_sin[:num_tokens], self.cos_sin[positions]
        x = F.embedding(input_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, context, is_seen, rotations)
        # Without drafts from the anchor's slot, its state predicts nothing.
        first = self.config.block_size - self.config.num_draft_tokens
        return self.norm(x)[:, :, first:]

    def compute_logits(
        self, hidden: torch.Tensor, predecessors: torch.Tensor
    ) -> torch.Tensor:
        """Return [n, K, draft_vocab_size], with the true tokens as predecessors.

        Args:
            hidden: [n, K, hidden_size].
            predecessors: [n, K] int64, the target's ids before each draft.
        """
        return self.logits_of(hidden, self.embed_predecessors(predecessors))

    def embed_predecessors(self, predecessors: torch.Tensor) -> torch.Tensor | None:
        """Return [n, K, markov_rank] of the target's ids [n, K]; None without table."""
        if self.markov_head is None:
            return None
        return self.markov_head.markov_w1(predecessors)

    def logits_of(
        self,
        hidden: torch.Tensor,
        embeddings: torch.Tensor | None,
        head: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [n, K, draft_vocab_size], of embedded predecessors.

        Args:
            head: the model's in another dtype; None for its own.
        """
        logits = F.linear(hidden, self.head if head is None else head)
        if self.markov_head is None:
            return logits
        assert embeddings is not None, "every predecessor is in the table"
        return logits + self.markov_head(hidden, embeddings)

    def compute_confidence(
        self, hidden: torch.Tensor, predecessors: torch.Tensor
    ) -> torch.Tensor | None:
        """Return uncalibrated logits [n, K] of each draft's acceptance, if predicted.

        Args:
            hidden: [n, K, hidden_size].
            predecessors: [n, K] int64.
        """
        return self.confidence_of(hidden, self.embed_predecessors(predecessors))

    def confidence_of(
        self, hidden: torch.Tensor, embeddings: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return confidence logits [n, K], of embedded predecessors."""
        if self.confidence_head is None:
            return None
        x = hidden
        if self.config.confidence_head_with_markov:
            assert embeddings is not None, "checked with the configuration"
            x = torch.cat((x, embeddings), dim=-1)
        return self.confidence_head.proj(x).squeeze(-1)

    @torch.no_grad()
    def export(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in a checkpoint, taps as they are."""
        weights = {name: value.detach() for name, value in self.state_dict().items()}
        if self.tap_scales is not None:
            weights["fc.weight"] = weights["fc.weight"] * self.tap_scales
        return weights

    @torch.no_grad()
    def round_to(self, dtype: torch.dtype) -> None:
        """Make the weights those that a checkpoint in a dtype gives back."""
        weights = self.export()
        self.tap_scales = None
        self.load_state_dict({k: v.to(dtype).float() for k, v in weights.items()})

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias") or name.startswith("confidence_head"):
                parameter.zero_()
            elif name == "markov_head.markov_w2.weight":
                # The bias starts at none; its gradient flows through the other table.
                parameter.zero_()
            else:
                is_table = name == "markov_head.markov_w1.weight"
                deviation = _TABLE_DEVIATION if is_table else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _DraftLayer(nn.Module):
    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = _RMSNorm(size, eps)
        self.self_attn = _DraftAttention(config)
        self.post_attention_layernorm = _RMSNorm(size, eps)
        self.mlp = _MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        is_seen: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, is_seen, rotations)
        return x + self.mlp(self.post_attention_layernorm(x))


class _MLP(nn.Module):
    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        size, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, wide, bias=bias)
        self.up_proj = nn.Linear(size, wide, bias=bias)
        self.down_proj = nn.Linear(wide, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _DraftAttention(nn.Module):
    """Every slot of a block attends to the context before it and to its block."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.num_kv_heads = config.num_key_value_heads
        q_size = config.num_attention_heads * head_dim
        kv_size = config.num_key_value_heads * head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(size, q_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, size, bias=config.attention_out_bias)
        self.q_norm = self.k_norm = None
        if config.architecture == "Qwen3ForCausalLM":
            self.q_norm = _RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = _RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        is_seen: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return [N, B, Q, hidden_size].

        Args:
            x: [N, B, Q, hidden_size].
            context: [N, S, hidden_size].
            is_seen: [N, 1, 1, B, 1, S] bool.
            rotations: [S, head_dim] and [N, B, Q, head_dim], cosines and sines.
        """
        of_context, of_blocks = rotations
        # Query heads are [kv head h, group g]: each kv head serves a group of them.
        queries = self._heads(self.q_proj(x), self.q_norm, of_blocks)
        queries = queries.unflatten(-2, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        context_keys = self._heads(self.k_proj(context), self.k_norm, of_context)
        block_keys = self._heads(self.k_proj(x), self.k_norm, of_blocks)
        context_values = self.v_proj(context).unflatten(-1, (-1, self.head_dim))
        block_values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))

        # Blocks do not see each other: no score between two of them is ever made.
        to_context = torch.einsum("nbqhgd,nshd->nhgbqs", queries, context_keys)
        to_context = to_context.masked_fill(~is_seen, float("-inf"))
        to_block = torch.einsum("nbqhgd,nbkhd->nhgbqk", queries, block_keys)
        scores = torch.cat((to_context, to_block), dim=-1)
        probs = scores.softmax(dim=-1, dtype=torch.float32)
        of_scores = probs.split((to_context.shape[-1], to_block.shape[-1]), dim=-1)
        out = torch.einsum("nhgbqs,nshd->nbqhgd", of_scores[0], context_values)
        out = out + torch.einsum("nhgbqk,nbkhd->nbqhgd", of_scores[1], block_values)
        return self.o_proj(out.flatten(-3))

    def _heads(
        self, x: torch.Tensor, norm: nn.Module | None, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Return heads [..., heads, head_dim] of x, normalised and rotated."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        cos, sin = cos_sin.unsqueeze(-2).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        return torch.cat(rotated, dim=-1)


class _MarkovHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.backbone.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.backbone.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden, embedding), dim=-1)).sigmoid()
            embedding = gate * embedding
        elif self.kind == "rnn":
            embedding = self._recur(hidden, embedding)
        return self.markov_w2(embedding)

    def _recur(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(embedding[:, 0])
        outs = []
        for h, e in zip(hidden.unbind(1), embedding.unbind(1), strict=True):
            joint = self.joint_proj(torch.cat((state, e, h), dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
            outs.append(out.tanh())
        return torch.stack(outs, dim=1)


class _ConfidenceHead(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size = config.backbone.hidden_size
        if config.confidence_head_with_markov:
            size += config.markov_rank
        self.proj = nn.Linear(size, 1)
