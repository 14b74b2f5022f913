"""What the output layer says of a step's logit rows, computed when it is asked for."""

from functools import cached_property

import torch

from vllm._cpu_ops_torch import LinearStatistics
from vllm.model_executor.models.interfaces import CausalLM
from vllm.v1.worker.gpu.sample.gumbel import greedy_argmax


class OutputRows:
    """The logits of a step, or, where nobody reads whole rows, what is said of them.

    Args:
        model: whose output layer it is.
        hidden_states: [num_logits, hidden_size], of the rows that are sampled.
    """

    def __init__(self, model: CausalLM, hidden_states: torch.Tensor) -> None:
        self._model = model
        self._hidden_states = hidden_states

    def __len__(self) -> int:
        """Return num_logits."""
        return self._hidden_states.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._hidden_states.device

    @property
    def all_rows(self) -> torch.Tensor:
        """[num_logits] int64, the rows by number."""
        return torch.arange(len(self), device=self.device)

    @property
    def no_rows(self) -> torch.Tensor:
        """[0] int64."""
        return torch.empty(0, dtype=torch.int64, device=self.device)

    @cached_property
    def logits(self) -> torch.Tensor:
        """[num_logits, vocab_size] float32, computed once; the reader may change them.

        NOTE: `argmax` then is of the changed ones, and `maybe_statistics` says nothing.
        """
        return self._model.compute_logits(self._hidden_states)

    def argmax(self) -> torch.Tensor:
        """Return each row's likeliest token, [num_logits] int64, as `greedy_argmax`.

        The logits are not written, unless they are already or the model cannot do else.
        """
        if "logits" not in self.__dict__:
            token_ids = self._model.maybe_compute_argmax(self._hidden_states)
            if token_ids is not None:
                return token_ids
        return greedy_argmax(self.logits)

    def maybe_statistics(
        self, listed_rows: torch.Tensor, num_tokens: int, written_rows: torch.Tensor
    ) -> LinearStatistics | None:
        """Return each row's argmax, and what is asked for of some rows, in one pass.

        None where the logits are written already or the model cannot do else.

        Args:
            listed_rows: [n] int64, increasing, of which log-probabilities are wanted.
            num_tokens: the likeliest of such a row, 1 to MAX_LISTED and at most all.
            written_rows: [m] int64, increasing, of which all logits are wanted; the
                reader may change them.
        """
        if "logits" in self.__dict__:
            return None
        return self._model.maybe_compute_statistics(
            self._hidden_states, listed_rows, num_tokens, written_rows
        )
