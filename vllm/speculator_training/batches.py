"""Batches of blocks, and what a drafter says to them."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm.speculator_training.anchors import build_blocks, sample_anchors
from vllm.speculator_training.features import FeatureStore
from vllm.speculator_training.losses import (
    DraftLosses,
    LossWeights,
    compute_draft_losses,
    compute_target_probs,
)
from vllm.speculator_training.modeling import DSparkTrainingModel

# Rows of the whole vocabulary at once, which bounds their memory.
_NUM_LOGIT_ROWS = 512


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
        final_idx: [n, K] int64, the row of `final` for each label.
    """

    hidden: torch.Tensor
    predecessors: torch.Tensor
    labels: torch.Tensor
    is_valid: torch.Tensor
    final: torch.Tensor
    final_idx: torch.Tensor


class Drafting:
    """A drafter over the sequences of a store.

    Args:
        draft_token_ids: [draft_vocab_size] int64, the target's ids; None for all.
        num_anchors: blocks of a sequence.
    """

    def __init__(
        self,
        model: DSparkTrainingModel,
        store: FeatureStore,
        draft_token_ids: torch.Tensor | None,
        num_anchors: int,
    ) -> None:
        self.model = model
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
        features = pad_sequence(
            [self.store.get(idx) for idx in indices], batch_first=True
        )
        taps, final = features[:, :, :-1].flatten(2), features[:, :, -1]
        positions = blocks.positions.to(device)
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
            final_idx,
        )

    def compute_losses(self, batch: DraftBatch, weights: LossWeights) -> DraftLosses:
        """Return the losses of a batch, to be differentiated."""
        return compute_draft_losses(
            self.model.compute_logits(batch.hidden, batch.predecessors),
            self.target_probs(batch.final)[batch.final_idx],
            self.draft_labels(batch.labels),
            batch.is_valid,
            self.model.compute_confidence(batch.hidden, batch.predecessors),
            weights,
        )

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
