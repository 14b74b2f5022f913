"""Root-mean-square normalisation."""

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.layer import Layer, empty_weight


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        name: of the weight in the checkpoint.
    """

    def __init__(self, size: int, eps: float, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype)
        self.eps = eps
        self.name = name

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> where that tensor goes."""
        return {f"{self.name}.weight": self.weight.data}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x, in a new tensor."""
        return ops.rms_norm(x, self.weight, self.eps)

    def forward_in_place(self, x: torch.Tensor) -> None:
        """Normalise x [T, num_heads, size], rows possibly strided, where it lies."""
        ops.rms_norm(x, self.weight, self.eps, out=x)
