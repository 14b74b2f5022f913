"""The table of token embeddings."""

import torch
import torch.nn.functional as F

from vllm.model_executor.layers.layer import Layer, empty_weight


class VocabEmbedding(Layer):
    """One row a token.

    Args:
        num_embeddings: rows.
        embedding_dim: width of a row.
        name: of the table in the checkpoint.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, name: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_weight(num_embeddings, embedding_dim, dtype=dtype)
        self.name = name

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        return {f"{self.name}.weight": self.weight.data}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, embedding_dim] of input_ids [T], in a new tensor."""
        return F.embedding(input_ids, self.weight)
