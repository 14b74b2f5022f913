"""The gated feed-forward block."""

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import Linear


class GatedMLP(Layer):
    """down(silu(gate(x)) * up(x)).

    Args:
        hidden_size: width of x.
        intermediate_size: width between.
        bias: all three layers have one.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            dtype=dtype,
        )
        self.down_proj = Linear(
            intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden_size] of x [T, hidden_size]."""
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
