"""Which blocks of a sequence a drafter is trained on, and what they hold.

Source: "DSpark", arXiv:2607.05147, training by anchors.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftBlocks:
    """Blocks of N sequences, B a sequence, K tokens a block.

    Args:
        input_ids: [N, B, K] int64, an anchor and then mask tokens.
        positions: [N, B, K] int64; also the rows of the target's final states that
            predict the labels.
        predecessors: [N, B, K] int64, the token before each label.
        labels: [N, B, K] int64, what follows the anchor; 0 where it is not valid.
        is_valid: [N, B, K] bool, a prefix of each block.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    predecessors: torch.Tensor
    labels: torch.Tensor
    is_valid: torch.Tensor


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors uniformly among those that have a label, without replacement.

    Args:
        loss_mask: [N, S] bool, tokens of answers.
        num_anchors: of each sequence.

    Returns:
        anchors: [N, num_anchors] int64, rising; 0 where there is none.
        is_real: [N, num_anchors] bool; a prefix of each sequence.
    """
    num_tokens = loss_mask.shape[1]
    is_candidate = torch.zeros_like(loss_mask)
    is_candidate[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    keys = torch.rand(
        loss_mask.shape, generator=generator, device=loss_mask.device
    ).masked_fill(~is_candidate, -1.0)
    best = keys.topk(min(num_anchors, num_tokens), dim=1)
    is_real = best.values >= 0
    # Past the end, so that those without an anchor are sorted to the back.
    anchors = best.indices.masked_fill(~is_real, num_tokens).sort(dim=1).values
    missing = num_anchors - anchors.shape[1]
    anchors = torch.nn.functional.pad(anchors, (0, missing), value=num_tokens)
    is_real = anchors < num_tokens
    return anchors.masked_fill(~is_real, 0), is_real


def build_blocks(
    token_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    is_real: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> DraftBlocks:
    """Return the blocks that start at the anchors.

    Args:
        token_ids: [N, S] int64.
        loss_mask: [N, S] bool.
        anchors: [N, B] int64, with is_real [N, B], from `sample_anchors`.
        block_size: K.
    """
    num_tokens = token_ids.shape[1]
    steps = torch.arange(block_size, device=token_ids.device)
    positions = anchors[:, :, None] + steps
    previous, is_inside = _take(token_ids, positions)
    labels, has_label = _take(token_ids, positions + 1)
    is_supervised = _take(loss_mask, positions + 1)[0] & has_label & is_inside
    # A label after a gap would be judged under a prefix that no answer has.
    is_valid = is_supervised.cumprod(dim=-1).bool() & is_real[:, :, None]
    input_ids = torch.full_like(positions, mask_token_id)
    is_anchored = is_real & (anchors < num_tokens)
    input_ids[:, :, 0] = previous[:, :, 0].where(is_anchored, mask_token_id)
    return DraftBlocks(
        input_ids, positions, previous, labels.where(is_valid, 0), is_valid
    )


def _take(
    values: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [N, S] at positions [N, B, K], and whether they are inside."""
    num_tokens = values.shape[1]
    is_inside = positions < num_tokens
    flat = positions.clamp(max=num_tokens - 1).flatten(1)
    return values.gather(1, flat).view(positions.shape), is_inside
