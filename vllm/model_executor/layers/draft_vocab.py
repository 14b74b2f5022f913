"""The part of the target's vocabulary that a drafter can draft."""

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.layer import Layer


class DraftVocab(Layer):
    """Draft ids and the target's ids that they stand for.

    Args:
        draft_vocab_size: tokens that can be drafted.
        vocab_size: of the target.
    """

    target_ids: torch.Tensor

    def __init__(self, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        # As stored: what is added to a draft id, and which of the target's ids are in.
        self._d2t = torch.empty(draft_vocab_size, dtype=torch.int64)
        self._t2d = torch.empty(vocab_size, dtype=torch.bool)
        self.register_buffer("target_ids", torch.empty_like(self._d2t), False)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        return {"d2t": self._d2t, "t2d": self._t2d}

    def process_weights_after_loading(self) -> None:
        """Turn the stored offsets into ids.

        Raises:
            CheckpointError: the two tables do not describe one subset of the ids.
        """
        ids = torch.arange(len(self._d2t), device=self._d2t.device) + self._d2t
        expected = self._t2d.nonzero().squeeze(1)
        if not torch.equal(ids, expected):
            raise CheckpointError(
                f"d2t maps {len(ids)} draft ids to ids of the target that are not the "
                f"{len(expected)} of t2d in rising order"
            )
        self.target_ids.copy_(ids)

    def map_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of draft ids, of the same shape."""
        return self.target_ids[draft_ids]
