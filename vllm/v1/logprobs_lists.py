"""Log-probabilities on the host, as they travel to the front, which needs no torch."""

from typing import NamedTuple

import numpy as np


class LogprobsLists(NamedTuple):
    """Log-probabilities on the host, one row a sampled token.

    Args:
        logprob_token_ids: [N, 1 + n] int; column 0 is the sampled token.
        logprobs: [N, 1 + n] float32.
        sampled_token_ranks: [N] int; 1 = most likely.
        cu_num_generated_tokens: [R + 1] row boundaries of the requests; None when each
            request has one row, or when the rows are one request's.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> "LogprobsLists":
        """Return the first `num_positions` rows of the request at `req_idx`."""
        boundaries = self.cu_num_generated_tokens
        start = req_idx if boundaries is None else boundaries[req_idx]
        rows = slice(start, start + num_positions)
        return LogprobsLists(
            self.logprob_token_ids[rows],
            self.logprobs[rows],
            self.sampled_token_ranks[rows],
        )
