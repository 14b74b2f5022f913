"""What a drafter is trained to do: be accepted, and know how often it will be.

Source: "DSpark", arXiv:2607.05147. All distributions are at temperature 1, unfiltered.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

_EPSILON = 1e-6


@dataclass(frozen=True)
class LossWeights:
    """How the losses are added up.

    Args:
        distillation: of the cross entropy to the target's whole distribution, which
            the paper does without: it has a slope where the total variation is flat,
            for a drafter that knows nothing yet.
        decay: drafts until a position counts 1 / e of the first.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    distillation: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class DraftLosses:
    """Losses of some blocks, K drafts a block.

    Args:
        total: scalar, the one to differentiate.
        cross_entropy: scalar, as the next two, of the target's sampled tokens.
        total_variation: full L1 distance of the two distributions.
        distillation: cross entropy of the target's distribution; 0 where not weighted.
        confidence: of the predicted acceptance; 0 without such a head.
        acceptance: [n, K], expected acceptance of each draft, detached; 0 where there
            is no label.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    distillation: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor

    def detach(self) -> "DraftLosses":
        """Return the values alone."""
        return DraftLosses(*(getattr(self, f.name).detach() for f in fields(self)))


@dataclass(frozen=True)
class WeightSums:
    """What the losses of some blocks are divided by.

    Args:
        valid: scalar, the weights of all labels.
        with_label: scalar, of those that can be drafted.
    """

    valid: torch.Tensor
    with_label: torch.Tensor


def compute_weight_sums(
    draft_labels: torch.Tensor, is_valid: torch.Tensor, weights: LossWeights
) -> WeightSums:
    """Return the divisors for n blocks.

    Args:
        draft_labels: [n, K] int64, -1 for a token that cannot be drafted.
        is_valid: [n, K] bool.
    """
    weight = _position_weight(is_valid, weights)
    return WeightSums(
        weight.sum() + _EPSILON, (weight * (draft_labels >= 0)).sum() + _EPSILON
    )


def compute_position_weights(num_draft_tokens: int, decay: float) -> torch.Tensor:
    """Return [num_draft_tokens] float32: exp(-(k - 1) / decay) of the k-th draft."""
    return torch.exp(-torch.arange(num_draft_tokens) / decay)


def compute_target_probs(
    target_logits: torch.Tensor, draft_token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the target's probabilities of what can be drafted, float32.

    Args:
        target_logits: [..., vocab_size].
        draft_token_ids: [draft_vocab_size] int64, the target's ids; None for all.

    Returns:
        [..., draft_vocab_size]; sums to less than 1 in a reduced vocabulary.
    """
    probs = target_logits.float().softmax(dim=-1)
    return probs if draft_token_ids is None else probs[..., draft_token_ids]


def compute_total_variation(
    draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> torch.Tensor:
    """Return sum over the target's vocabulary of |draft - target|, in [0, 2].

    Args:
        draft_probs: [..., draft_vocab_size].
        target_probs: of its shape; what is missing to 1 lies where nothing is drafted.

    Returns:
        [...].
    """
    outside = (1 - target_probs.sum(dim=-1)).clamp(min=0)
    return (draft_probs - target_probs).abs().sum(dim=-1) + outside


def compute_draft_losses(
    draft_logits: torch.Tensor,
    target_probs: torch.Tensor,
    draft_labels: torch.Tensor,
    is_valid: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    weights: LossWeights,
    weight_sums: WeightSums | None = None,
) -> DraftLosses:
    """Compute the losses of n blocks.

    Args:
        draft_logits: [n, K, draft_vocab_size], the Markov bias included.
        target_probs: [n, K, draft_vocab_size], from `compute_target_probs`.
        draft_labels: [n, K] int64, draft ids; -1 for a token that cannot be drafted,
            which the cross entropy leaves out.
        is_valid: [n, K] bool.
        confidence_logits: [n, K], uncalibrated; None without such a head.
        weight_sums: of all blocks, where these are a part of them: the losses of the
            parts then add up to those of the whole. None for a whole.
    """
    log_probs = draft_logits.float().log_softmax(dim=-1)
    distance = compute_total_variation(log_probs.exp(), target_probs)
    acceptance = (1 - distance / 2).clamp(0, 1).detach()

    weight = _position_weight(is_valid, weights)
    has_label = draft_labels >= 0
    if weight_sums is None:
        weight_sums = compute_weight_sums(draft_labels, is_valid, weights)
    picked = log_probs.gather(-1, draft_labels.clamp(min=0)[..., None])[..., 0]
    cross_entropy = (-picked * weight * has_label).sum() / weight_sums.with_label
    total_variation = (distance * weight).sum() / weight_sums.valid
    distillation = confidence = total_variation.new_zeros(())
    if weights.distillation:
        soft = -(target_probs * log_probs).sum(dim=-1)
        distillation = (soft * weight).sum() / weight_sums.valid
    if confidence_logits is not None:
        each = F.binary_cross_entropy_with_logits(
            confidence_logits.float(), acceptance, reduction="none"
        )
        confidence = (each * weight).sum() / weight_sums.valid
    total = (
        weights.cross_entropy * cross_entropy
        + weights.total_variation * total_variation
        + weights.distillation * distillation
        + weights.confidence * confidence
    )
    return DraftLosses(
        total,
        cross_entropy,
        total_variation,
        distillation,
        confidence,
        acceptance * is_valid,
    )


def add_losses(parts: Iterable[DraftLosses]) -> DraftLosses:
    """Return the losses of all blocks from those of their parts."""
    parts = list(parts)
    return DraftLosses(
        total=torch.stack([part.total for part in parts]).sum(),
        cross_entropy=torch.stack([part.cross_entropy for part in parts]).sum(),
        total_variation=torch.stack([part.total_variation for part in parts]).sum(),
        distillation=torch.stack([part.distillation for part in parts]).sum(),
        confidence=torch.stack([part.confidence for part in parts]).sum(),
        acceptance=torch.cat([part.acceptance for part in parts]),
    )


def compute_expected_length(acceptance: torch.Tensor) -> torch.Tensor:
    """Return the mean number of tokens that a round emits, the bonus token included.

    Args:
        acceptance: [n, K], of each draft given those before it.
    """
    return 1 + acceptance.cumprod(dim=-1).sum(dim=-1).mean()


def _position_weight(is_valid: torch.Tensor, weights: LossWeights) -> torch.Tensor:
    position_weights = compute_position_weights(is_valid.shape[1], weights.decay)
    return is_valid * position_weights.to(is_valid.device)
