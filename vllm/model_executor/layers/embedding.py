"""The table of token embeddings."""

import torch
import torch.nn.functional as F

from vllm._cpu_ops_drafter import TableWeights
from vllm.model_executor.layers.layer import Layer, empty_weight
from vllm.model_executor.layers.quantization.methods import QuantizationMethod
from vllm.model_executor.layers.quantization.weights import (
    Blocks,
    PackedWeight,
    QuantizedWeight,
)


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
        self._numbers = empty_weight(num_embeddings, embedding_dim, dtype=dtype)
        self._quantized: PackedWeight | None = None
        self._size = embedding_dim
        self.name = name

    @property
    def weight(self) -> torch.Tensor:
        """[num_embeddings, embedding_dim]; a copy where the table is quantised."""
        quantized = self._quantized
        return self._numbers if quantized is None else quantized.unpack()

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        return {f"{self.name}.weight": self._numbers.data}

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """Take the table as blocks, in place of what goes to its slot."""
        assert name == f"{self.name}.weight", "there is one slot"
        self._quantized = QuantizedWeight.from_blocks(blocks)
        self._numbers.data = self._numbers.data.new_empty(0)
        return True

    def as_head(self, method: QuantizationMethod) -> PackedWeight:
        """Return the table as the weight of an output layer."""
        return self._quantized or method.pack(self._numbers.data)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, embedding_dim] of input_ids [T] int64, in a new tensor."""
        if self._quantized is not None:
            return self._quantized.rows(input_ids)
        return F.embedding(input_ids, self._numbers)

    def compiled_table(self) -> TableWeights | None:
        """Return the rows as the compiled operators read them; None if others do."""
        if self._quantized is None:
            return TableWeights(self._numbers.data, "float32", *self._numbers.shape)
        parts = self._quantized.compiled_parts()
        if parts is None or len(parts) > 1:
            return None
        [part] = parts
        return TableWeights(part.packed, part.quant_type, part.num_columns, self._size)
