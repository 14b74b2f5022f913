"""Costs of steps that grow by the token: what is assumed where nothing was measured."""

import numpy as np


class LinearCosts:
    """A fixed cost, one for each token and one for each request that is drafted for.

    Args:
        fixed_ms: of every step.
        token_ms: of each token that the target computes.
        draft_req_ms: of the first draft of one request.
        next_draft_ms: of each of its others.
    """

    def __init__(
        self,
        fixed_ms: float = 10.0,
        token_ms: float = 0.5,
        draft_req_ms: float = 0.5,
        next_draft_ms: float = 0.0,
    ) -> None:
        self._fixed_ms = fixed_ms
        self._token_ms = token_ms
        self._draft_req_ms = draft_req_ms
        self._next_draft_ms = next_draft_ms

    def step_costs(
        self,
        num_draft_reqs: int,
        num_non_draft_tokens: int,
        max_drafts: int,
        num_next_drafts: int,
    ) -> np.ndarray:
        """Return the cost of a step for 0 to max_drafts drafts; see StepCosts."""
        first = self.step_cost_without_drafting(num_non_draft_tokens)
        if num_next_drafts:
            req_ms = self._draft_req_ms + self._next_draft_ms * (num_next_drafts - 1)
            first += req_ms * num_draft_reqs
        return first + self._token_ms * np.arange(max_drafts + 1)

    def step_cost_without_drafting(self, num_non_draft_tokens: int) -> float:
        """Return the cost of a step that no drafting follows."""
        return self._fixed_ms + self._token_ms * num_non_draft_tokens

    def observe(
        self,
        num_draft_reqs: int,
        num_tokens: int,
        step_ms: float,
        num_next_drafts: int,
    ) -> None:
        """Learn nothing."""
