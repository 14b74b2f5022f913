"""Output layers that say what was asked of them."""

import torch

from vllm._cpu_ops_torch import LinearStatistics
from vllm.v1.worker.gpu.sample.gumbel import greedy_argmax
from vllm.v1.worker.gpu.sample.logprob import _likeliest_token_ids, logprob_stats
from vllm.v1.worker.gpu.sample.output_rows import OutputRows


class OutputLayer:
    """A model whose hidden states are its logits.

    Args:
        finds_argmax: whether it can without writing them; statistics too.
    """

    def __init__(self, *, finds_argmax: bool = False) -> None:
        self.finds_argmax = finds_argmax
        # Of the passes, in their order.
        self.passes: list[str] = []
        # Rows that were written beside statistics.
        self.num_written: list[int] = []

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.passes.append("logits")
        return hidden_states

    def maybe_compute_argmax(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        if not self.finds_argmax:
            return None
        self.passes.append("argmax")
        return greedy_argmax(hidden_states)

    def maybe_compute_statistics(
        self,
        hidden_states: torch.Tensor,
        listed_rows: torch.Tensor,
        count: int,
        written_rows: torch.Tensor,
    ) -> LinearStatistics | None:
        if not self.finds_argmax:
            return None
        self.passes.append("statistics")
        argmax, listed = greedy_argmax(hidden_states), hidden_states[listed_rows]
        ids = _likeliest_token_ids(listed, count)
        logsumexp, _ = logprob_stats(listed, ids[:, 0].contiguous())
        products = listed.gather(1, ids)
        written = hidden_states[written_rows]
        self.num_written.append(len(written))
        return LinearStatistics(argmax, ids, products, logsumexp, written)


def rows_of(logits: torch.Tensor) -> OutputRows:
    """Return rows with these logits, which are changed where they may be."""
    return OutputRows(OutputLayer(), logits)
