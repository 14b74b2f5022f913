"""What becomes of drafts under verification, replayed on recorded answers.

An answer's next token y was drawn from the target's p. Accepting y with probability
min(1, q(y) / p(y)) keeps and accepts each token as often as speculative sampling from
the drafter's q does, so the accepted path is the answer itself and the target need not
run again. A greedy draft is accepted where it is the token that the target drew.
"""

from dataclasses import dataclass

import torch

from vllm.speculator_training.batches import DraftBatch, Drafting

# The engine's ratio test has the same floor.
_MIN_PROB = 1e-8


@dataclass(frozen=True)
class Rollouts:
    """Whole blocks of one temperature and one way to draft.

    Args:
        confidence_logits: [n, K] float32, uncalibrated; None without such a head.
        is_accepted: [n, K] bool, a prefix of each block.
    """

    temperature: float
    is_greedy: bool
    confidence_logits: torch.Tensor | None
    is_accepted: torch.Tensor

    @property
    def acceptance(self) -> list[float]:
        """Share of each draft's acceptances among those whose predecessors passed."""
        survival = [1.0, *self.survival]
        return [
            after / before if before else 0.0
            for before, after in zip(survival, survival[1:], strict=False)
        ]

    @property
    def survival(self) -> list[float]:
        """Share of blocks in which the drafts up to each place are accepted."""
        return self.is_accepted.float().mean(dim=0).tolist()

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a round, the bonus token included."""
        return 1 + sum(self.survival)


@torch.no_grad()
def roll_out(
    drafting: Drafting, indices: list[int], batch_size: int, seed: int
) -> list[Rollouts]:
    """Return rollouts by temperature, drafted greedily and, above 0, by draws.

    Args:
        indices: of sequences, whose answers were drawn unfiltered.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = drafting.store.sequences
    result = []
    for temperature in sorted({sequences[idx].temperature for idx in indices}):
        chosen = [idx for idx in indices if sequences[idx].temperature == temperature]
        for is_greedy in (True, False) if temperature else (True,):
            logits: list[torch.Tensor] = []
            accepted = []
            for start in range(0, len(chosen), batch_size):
                part = chosen[start : start + batch_size]
                batch = _whole_blocks(drafting.run(part, generator))
                confidence, is_accepted = _draft(
                    drafting, batch, temperature, is_greedy, generator
                )
                accepted.append(is_accepted.cpu())
                if confidence is not None:
                    logits.append(confidence.float().cpu())
            stacked = torch.cat(logits) if logits else None
            rollouts = Rollouts(temperature, is_greedy, stacked, torch.cat(accepted))
            if len(rollouts.is_accepted):
                result.append(rollouts)
    return result


def _whole_blocks(batch: DraftBatch) -> DraftBatch:
    """Leave out the blocks that reach past the end of the answer."""
    keep = batch.is_valid.all(dim=-1)
    return DraftBatch(
        batch.hidden[keep],
        batch.predecessors[keep],
        batch.labels[keep],
        batch.is_valid[keep],
        batch.final,
        batch.normalizers,
        batch.final_idx[keep],
    )


def _draft(
    drafting: Drafting,
    batch: DraftBatch,
    temperature: float,
    is_greedy: bool,
    generator: torch.Generator,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return confidences [n, K] of the drafter's own tokens, and what is accepted."""
    model = drafting.model
    num_drafts = batch.labels.shape[1]
    predecessors = batch.predecessors.clone()
    is_accepted = torch.zeros_like(batch.is_valid)
    is_alive = torch.ones_like(batch.is_valid[:, 0])
    labels = drafting.draft_labels(batch.labels)
    if not is_greedy:
        target_probs = drafting.target_probs(batch.final, temperature)
    for k in range(num_drafts):
        seen = batch.hidden[:, : k + 1], predecessors[:, : k + 1]
        logits = model.compute_logits(*seen)[:, k].float()
        if is_greedy:
            drafts = logits.argmax(dim=-1)
            is_alive = is_alive & (drafts == labels[:, k])
        else:
            target = target_probs[batch.final_idx[:, k]]
            probs = (logits / temperature).softmax(dim=-1)
            drafts, passes = _draw(probs, target, labels[:, k], is_alive, generator)
            is_alive = is_alive & passes
        is_accepted[:, k] = is_alive
        if k + 1 < num_drafts:
            predecessors[:, k + 1] = drafting.target_ids(drafts)
    return model.compute_confidence(batch.hidden, predecessors), is_accepted


def _draw(
    probs: torch.Tensor,
    target: torch.Tensor,
    labels: torch.Tensor,
    is_alive: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts [n], and whether they are accepted, given the target's token.

    Args:
        probs: [n, draft_vocab_size], the drafter's.
        target: of its shape; right where the block is alive.
        labels: [n] int64, the target's token as a draft id, -1 for none.
    """
    picked = labels.clamp(min=0)[:, None]
    ratio = probs.gather(1, picked) / target.gather(1, picked).clamp(min=_MIN_PROB)
    draws = torch.rand(len(labels), generator=generator).to(probs.device)
    passes = (draws < ratio[:, 0]) & (labels >= 0) & is_alive
    # A rejected draft has the law of what the drafter says too often.
    surplus = (probs - target).clamp(min=0)
    has_surplus = surplus.sum(dim=-1, keepdim=True) > _MIN_PROB
    law = surplus.where(is_alive[:, None] & has_surplus, probs).cpu()
    others = (
        torch.multinomial(law, 1, generator=generator)[:, 0] if len(law) else labels
    )
    return labels.where(passes, others.to(labels.device)), passes
