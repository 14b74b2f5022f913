"""The small heads of a DSpark drafter: bias by the previous token, and confidence."""

import torch

from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import Linear
from vllm.transformers_utils.configs.dspark import DSparkConfig


class MarkovHead(Layer):
    """A low-rank bigram table, possibly gated or with a memory of the block.

    Args:
        config: of the drafter; its rank is above 0.
    """

    def __init__(self, config: DSparkConfig, dtype: torch.dtype) -> None:
        super().__init__()
        rank, hidden_size = config.markov_rank, config.backbone.hidden_size
        self.rank = rank
        self.kind = config.markov_head_type
        self.markov_w1 = VocabEmbedding(
            config.backbone.vocab_size, rank, "markov_w1", dtype
        )
        self.markov_w2 = Linear(
            rank, {"markov_w2": config.draft_vocab_size}, bias=False, dtype=dtype
        )
        if self.kind == "gated":
            self.gate_proj = Linear(
                hidden_size + rank, {"gate_proj": rank}, bias=True, dtype=dtype
            )
        elif self.kind == "rnn":
            self.joint_proj = Linear(
                2 * rank + hidden_size,
                {"joint_proj": 3 * rank},
                bias=True,
                dtype=dtype,
            )

    @property
    def is_bigram(self) -> bool:
        """Whether a draft's bias depends on the token before it alone."""
        return self.kind == "vanilla"

    def walk(
        self,
        logits: torch.Tensor,
        first_ids: torch.Tensor,
        column_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the likeliest tokens of a bigram head, each knowing the one before.

        Args:
            logits: [K, R, draft_vocab_size] float32.
            first_ids: [R] int64, tokens before the first draft.
            column_ids: [draft_vocab_size] int64, tokens that the columns stand for;
                None: column i for token i.

        Returns:
            ids: [R, K] int64.
            embeddings: [R, K, rank], the row of the token before each.
        """
        assert self.is_bigram, "the other heads read more than the token before"
        ids, embeddings = [first_ids], []
        for values in logits:
            embeddings.append(self.markov_w1(ids[-1]))
            scores = values + self.markov_w2(embeddings[-1]).float()
            # NaN is never chosen.
            best = scores.masked_fill(scores.isnan(), float("-inf")).argmax(dim=-1)
            ids.append(best if column_ids is None else column_ids[best])
        return torch.stack(ids[1:], dim=1), torch.stack(embeddings, dim=1)

    def initial_state(self, num_reqs: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the memory at a block's start, [num_reqs, rank]; None if not kept."""
        return like.new_zeros(num_reqs, self.rank) if self.kind == "rnn" else None

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the bias of one draft's logits.

        Args:
            embedding: [R, rank], row of `markov_w1` of the token before the draft.
            hidden: [R, hidden_size], the draft's hidden state.
            state: of the draft before, from here or `initial_state`.

        Returns:
            bias: [R, draft_vocab_size] float32.
            state: for the next draft.
        """
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden, embedding), dim=-1)).sigmoid()
            embedding = gate * embedding
        elif self.kind == "rnn":
            assert state is not None, "the rnn head has a state from the block's start"
            joint = self.joint_proj(torch.cat((state, embedding, hidden), dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            keep = gate.sigmoid()
            # The bias reads the state before this draft, through `out`.
            state = keep * state + (1 - keep) * candidate.tanh()
            embedding = out.tanh()
        return self.markov_w2(embedding).float(), state


class ConfidenceHead(Layer):
    """The logit of a draft's acceptance, given that those before it were accepted.

    Args:
        config: of the drafter.
    """

    temperatures: torch.Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        size = config.backbone.hidden_size
        if self.with_markov:
            size += config.markov_rank
        # Float32 in every model: the products of many are compared.
        self.proj = Linear(size, {"proj": 1}, bias=True, dtype=torch.float32)
        temperatures = (
            config.confidence_temperatures or (1.0,) * config.num_draft_tokens
        )
        self.register_buffer(
            "temperatures", torch.tensor(temperatures), persistent=False
        )

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """Return calibrated logits [R, K] float32 of the first K drafts of a block.

        Args:
            hidden: [R, K, hidden_size].
            embedding: [R, K, rank], of the token before each draft; read only by a
                head that was trained with it.
        """
        x = hidden.float()
        if self.with_markov:
            assert embedding is not None, "the head reads the previous token's row"
            x = torch.cat((x, embedding.float()), dim=-1)
        logits = self.proj(x.flatten(0, 1)).view(x.shape[:2])
        return logits / self.temperatures[: logits.shape[1]]
