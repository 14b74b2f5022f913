"""What the runner and the drafters expect of a model."""

from typing import Protocol, runtime_checkable

import torch

from vllm._cpu_ops_torch import LinearStatistics
from vllm.v1.kv_cache_interface import FullAttentionSpec


@runtime_checkable
class CausalLM(Protocol):
    """A model that predicts the next token."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return hidden states [T, hidden_size], and the taps if any are set."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [N, vocab_size] float32."""

    def maybe_compute_argmax(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return [N] int64, the likeliest tokens, found without writing their logits.

        The first of equal ones, NaN left out, -1 where no logit is above -inf; None
        where the output layer can only write the logits.
        """

    def maybe_compute_statistics(
        self,
        hidden_states: torch.Tensor,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics | None:
        """Return what samplers read of the logits, few of which are written.

        None where the output layer can only write all of them.

        Args:
            listed_rows: [n] int64, increasing; of which the likeliest tokens are
                wanted.
            count: of these, 1 to MAX_LISTED and at most all.
            written_rows: [m] int64, increasing; of which all logits are wanted.
        """

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
        """Return layer name -> what it stores, keys and values in this dtype."""


@runtime_checkable
class SupportsTaps(Protocol):
    """A model whose inner states a drafter can read."""

    def set_aux_hidden_state_layers(self, layer_ids: tuple[int, ...]) -> None:
        """Make the forward pass return the stream that enters these layers."""
