"""Batches of blocks, and what a drafter says to them."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from vllm.speculator_training.anchors import build_blocks, sample_anchors
from vllm.speculator_training.features import FeatureStore
from vllm.speculator_training.losses import (
    DraftLosses,
    LossWeights,
    add_losses,
    compute_draft_losses,
    compute_target_probs,
    compute_weight_sums,
)
from vllm.speculator_training.modeling import DSparkTrainingModel

# Rows of the whole vocabulary at once, which bounds their memory.
_NUM_LOGIT_ROWS = 512
# Blocks whose logits exist at once: few enough for the caches.
_NUM_BLOCKS_AT_ONCE = 16


@dataclass(frozen=True)
class DraftBatch:
    """n blocks that hold a label, of K drafts each.

    Args:
        hidden: [n, K, hidden_size], the drafter's states.
        predecessors: [n, K] int64, true tokens.
        labels: [n, K] int64, the target's ids.
        is_valid: [n, K] bool, a prefix of each block.
        final: [U, hidden_size], the target's states that predict labels, each once:
            blocks overlap, and the target's vocabulary is what costs most.
        normalizers: [U] float32, of those states; see `Features`.
        final_idx: [n, K] int64, the row of `final` for each label.
    """

    hidden: torch.Tensor
    predecessors: torch.Tensor
    labels: torch.Tensor
    is_valid: torch.Tensor
    final: torch.Tensor
    normalizers: torch.Tensor
    final_idx: torch.Tensor


class Drafting:
    """A drafter over the sequences of a store.

    Args:
        draft_token_ids: [draft_vocab_size] int64, the target's ids; None for all.
        num_anchors: blocks of a sequence.
        compute_dtype: of matrix products.
    """

    def __init__(
        self,
        model: DSparkTrainingModel,
        store: FeatureStore,
        draft_token_ids: torch.Tensor | None,
        num_anchors: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.compute_dtype = compute_dtype
        # Not cast anew for each product.
        self._head = model.head.to(compute_dtype)
        self.store = store
        self.num_anchors = num_anchors
        device = store.runner.device
        vocab_size = model.config.backbone.vocab_size
        self.draft_token_ids = self._draft_ids = None
        if draft_token_ids is not None:
            self.draft_token_ids = draft_token_ids.to(device)
            # [vocab_size] int64: the draft id of each of the target's, or -1.
            self._draft_ids = torch.full((vocab_size,), -1, device=device)
            self._draft_ids[self.draft_token_ids] = torch.arange(
                len(draft_token_ids), device=device
            )

    def run(self, indices: Items[int], generator: torch.Generator) -> DraftBatch:
        """Draw anchors in some sequences, and run the drafter from them."""
        sequences = [self.store.sequences[idx] for idx in indices]
        token_ids = pad_sequence([s.token_ids for s in sequences], batch_first=True)
        steps = torch.arange(token_ids.shape[1])
        starts = torch.tensor([s.num_prompt_tokens for s in sequences])
        ends = torch.tensor([len(s.token_ids) for s in sequences])
        loss_mask = (steps >= starts[:, None]) & (steps < ends[:, None])
        anchors, is_real = sample_anchors(loss_mask, self.num_anchors, generator)
        config = self.model.config
        blocks = build_blocks(
            token_ids,
            loss_mask,
            anchors,
            is_real,
            config.block_size,
            config.mask_token_id,
        )
        device = self.store.runner.device
        features = self.store.get(indices)
        states = pad_sequence([f.states for f in features], batch_first=True)
        normalizers = pad_sequence([f.normalizers for f in features], batch_first=True)
        taps, final = states[:, :, :-1].flatten(2), states[:, :, -1]
        positions = blocks.positions.to(device)
        with self._narrow_products():
            hidden = self.model(taps, blocks.input_ids.to(device), positions)
        # Without drafts from the anchor's slot, there is one fewer than positions.
        num_drafts = hidden.shape[2]
        rows = positions[:, :, :num_drafts].clamp(max=token_ids.shape[1] - 1)
        batch_idx = torch.arange(len(indices), device=device)[:, None, None]
        keep = blocks.is_valid[:, :, 0]

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values[:, :, :num_drafts].to(device)[keep.to(device)]

        used, final_idx = pick(batch_idx * token_ids.shape[1] + rows).unique(
            return_inverse=True
        )
        return DraftBatch(
            pick(hidden),
            pick(blocks.predecessors),
            pick(blocks.labels),
            pick(blocks.is_valid),
            final.flatten(0, 1)[used],
            normalizers.flatten()[used],
            final_idx,
        )

    @torch.no_grad()
    def compute_losses(self, batch: DraftBatch, weights: LossWeights) -> DraftLosses:
        """Return the losses of a batch."""
        embeddings = self.model.embed_predecessors(batch.predecessors)
        return add_losses(self._losses(batch, weights, batch.hidden, embeddings))

    def backward(self, batch: DraftBatch, weights: LossWeights) -> DraftLosses:
        """Add a batch's gradients to those of the drafter; return its losses.

        Logits and their gradients exist for a few blocks at a time only.
        """
        embeddings = self.model.embed_predecessors(batch.predecessors)
        roots = [batch.hidden] if embeddings is None else [batch.hidden, embeddings]
        leaves = [root.detach().requires_grad_() for root in roots]
        inputs = leaves[0], None if embeddings is None else leaves[1]
        parts = []
        for losses in self._losses(batch, weights, *inputs):
            losses.total.backward()
            parts.append(losses.detach())
        torch.autograd.backward(roots, [leaf.grad for leaf in leaves])
        return add_losses(parts)

    def _losses(
        self,
        batch: DraftBatch,
        weights: LossWeights,
        hidden: torch.Tensor,
        embeddings: torch.Tensor | None,
    ) -> Iterator[DraftLosses]:
        """Yield the losses of a few blocks after another, which add up."""
        labels = self.draft_labels(batch.labels)
        sums = compute_weight_sums(labels, batch.is_valid, weights)
        with self._narrow_products():
            target_probs = self._known_target_probs(batch.final, batch.normalizers)
            for start in range(0, len(labels), _NUM_BLOCKS_AT_ONCE):
                part = slice(start, start + _NUM_BLOCKS_AT_ONCE)
                inputs = hidden[part], None if embeddings is None else embeddings[part]
                yield compute_draft_losses(
                    self.model.logits_of(*inputs, self._head),
                    target_probs[batch.final_idx[part]],
                    labels[part],
                    batch.is_valid[part],
                    self.model.confidence_of(*inputs),
                    weights,
                    sums,
                )

    @torch.no_grad()
    def _known_target_probs(
        self, final: torch.Tensor, normalizers: torch.Tensor
    ) -> torch.Tensor:
        """Return [U, draft_vocab_size] at temperature 1, without the other tokens."""
        logits = F.linear(final.to(self.compute_dtype), self._head).float()
        # The normalizers were rounded elsewhere: no probability is above one.
        return logits.sub_(normalizers[:, None]).clamp_(max=0).exp_()

    def _narrow_products(self) -> torch.autocast:
        device_type = self.store.runner.device.type
        is_narrow = self.compute_dtype != torch.float32
        return torch.autocast(device_type, self.compute_dtype, enabled=is_narrow)

    @torch.no_grad()
    def target_probs(
        self, final: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return [U, draft_vocab_size] of final states [U, hidden_size]."""
        pieces = [
            compute_target_probs(
                self.store.runner.compute_logits(rows) / temperature,
                self.draft_token_ids,
            )
            for rows in final.split(_NUM_LOGIT_ROWS)
        ]
        return torch.cat(pieces)

    def draft_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return draft ids of the target's ids; -1 where none is drafted."""
        return labels if self._draft_ids is None else self._draft_ids[labels]

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of draft ids."""
        ids = self.draft_token_ids
        return draft_ids if ids is None else ids[draft_ids]
