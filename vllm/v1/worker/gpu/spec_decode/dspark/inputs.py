"""Where a drafter of blocks writes its context, and what its blocks read."""

from dataclasses import dataclass

import torch

from vllm.v1.worker.gpu.batch_layout import find_owners
from vllm.v1.worker.gpu.block_table import PAD_SLOT_ID


@dataclass(frozen=True)
class BlockInputs:
    """One block of Q tokens for each of R requests.

    Args:
        input_ids: [R * Q] int64, an anchor and then mask tokens.
        positions: [R * Q] int64, within the drafter's context.
        slot_mapping: [R * Q] int64; -1 for a token past the end of that context: it is
            computed at position 0, and its output means nothing.
        seq_lens: [R] int32, the context and what the block has of its own.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor


def drop_rejected_slots(
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """Return the slots of a step's tokens, without those that are no context.

    Args:
        slot_mapping: [num_tokens] int64, of the target.
        positions: [num_tokens] int64.
        query_start_loc: [num_reqs + 1] int32.
        num_computed_tokens: [num_reqs] int32, after the step: rejected drafts stand at
            or behind it.
        max_len: positions that the drafter has.
    """
    batch_idx = find_owners(query_start_loc[1:], len(positions))
    is_context = positions < num_computed_tokens.clamp(max=max_len)[batch_idx]
    return slot_mapping.masked_fill(~is_context, PAD_SLOT_ID)


def lay_out_blocks(
    anchor_ids: torch.Tensor,
    anchor: torch.Tensor,
    num_slots: int,
    mask_token_id: int,
    block_table: torch.Tensor,
    block_size: int,
    max_len: int,
) -> BlockInputs:
    """Lay out an anchor and mask tokens behind the context of each request.

    Args:
        anchor_ids: [R] int64, the last known tokens.
        anchor: [R] int64, their positions.
        num_slots: Q.
        mask_token_id: what a block holds behind its anchor.
        block_table: [R, num_blocks] int32.
        block_size: tokens a cache block.
        max_len: positions that the drafter and the cache have.
    """
    positions = anchor.unsqueeze(1) + torch.arange(num_slots, device=anchor.device)
    has_place = positions < max_len
    places = positions.masked_fill(~has_place, 0)
    slots = block_table.gather(1, places // block_size).long() * block_size
    slots += places % block_size
    input_ids = torch.full_like(positions, mask_token_id)
    input_ids[:, 0] = anchor_ids
    return BlockInputs(
        input_ids.flatten(),
        places.flatten(),
        slots.masked_fill_(~has_place, PAD_SLOT_ID).flatten(),
        (anchor + num_slots).clamp(max=max_len).to(torch.int32),
    )
