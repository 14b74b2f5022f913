"""How many drafts a step verifies: the rule that weighs tokens against time."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from vllm import _custom_ops as ops
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.spec_decode.confidence_history import ConfidenceHistory


@dataclass(frozen=True)
class BudgetChoice:
    """What a policy decided about a step before it runs.

    Args:
        draft_budget: drafts to verify, at most those that are scheduled.
        max_next_drafts: of a request, that are proposed for the next step at the end of
            it; 0: none are, None: as many as it may have.
        predicted_ms: how long the step will take; None: the policy has no idea.
    """

    draft_budget: int
    max_next_drafts: int | None = None
    predicted_ms: float | None = None


@dataclass(frozen=True)
class StepTiming:
    """What a step was, and how long it took.

    Args:
        num_draft_reqs: requests that drafts were proposed for, or would have been.
        num_tokens: tokens that the target computed.
        max_next_drafts: of a request, that were proposed; 0: none were.
        step_ms: from its plan to the plan of the next step.
    """

    num_draft_reqs: int
    num_tokens: int
    max_next_drafts: int
    step_ms: float


class BudgetPolicy(ABC):
    """Decides, from what is past, how many drafts a step verifies."""

    # Whether anything that depends on the drafter's confidences is asked for.
    reads_confidences = True

    @abstractmethod
    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        """Decide about a step.

        Args:
            step: as it was scheduled.
            max_drafts_np: [num_reqs] int32, drafts that the requests may have.
            history: of the confidences; the live ones are not to be read.
        """

    def observe_step(  # noqa: B027 - most policies learn nothing
        self, timing: StepTiming
    ) -> None:
        """Learn how long the last step took."""


class VerifyAll(BudgetPolicy):
    """Every scheduled draft is verified."""

    reads_confidences = False

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        """Take them all."""
        return BudgetChoice(step.num_drafts)


class FixedBudget(BudgetPolicy):
    """As many drafts in every step, over all requests.

    Args:
        draft_budget: their number.
        max_next_drafts: as in its choices.
    """

    def __init__(self, draft_budget: int, max_next_drafts: int | None = None) -> None:
        self._draft_budget = draft_budget
        self._max_next_drafts = max_next_drafts

    def choose(
        self, step: ScheduledStep, max_drafts_np: np.ndarray, history: ConfidenceHistory
    ) -> BudgetChoice:
        """Take that number, or all if there are fewer."""
        draft_budget = min(self._draft_budget, step.num_drafts)
        return BudgetChoice(draft_budget, self._max_next_drafts)


def list_draft_lengths(num_speculative_tokens: int, most: int) -> list[int]:
    """Return the numbers of drafts of a request that proposals are made for.

    They are few, since each is compiled, or laid out, on its own: doublings and all.

    Args:
        num_speculative_tokens: all that a request can have.
        most: that any request of the step may have; behind the first length that is not
            below it there is nothing to choose.
    """
    lengths = [1]
    while lengths[-1] < min(most, num_speculative_tokens):
        lengths.append(min(2 * lengths[-1], num_speculative_tokens))
    return lengths


def expected_gains(
    past_confidences: np.ndarray, num_drafts_np: np.ndarray
) -> np.ndarray:
    """Return how many drafts are accepted if the likeliest are verified.

    Args:
        past_confidences: [num_rounds, num_reqs, num_speculative_tokens] float64, each
            round as good a guess as the others.
        num_drafts_np: [num_reqs] int32, drafts of each request.

    Returns:
        [sum of num_drafts_np + 1] float64: the mean over the rounds, for 0 drafts, the
        likeliest one, the two likeliest, and so on.

    Twin: _expected_gains_numpy.
    """
    num_drafts = sum(num_drafts_np.tolist())
    if num_drafts == 0:
        return np.zeros(1)
    native = ops.maybe_budget_ops()
    impl = _expected_gains_numpy if native is None else native.expected_gains
    return impl(past_confidences, num_drafts_np, num_drafts)


def choose_draft_budget(
    num_sampling_reqs: int, gains: np.ndarray, costs_ms: np.ndarray
) -> int:
    """Return the number of drafts with most tokens a second.

    All numbers are looked at: costs are a staircase where execution is padded, and the
    best stair need not be the first one that is worse than its neighbour.

    Args:
        num_sampling_reqs: tokens that come anyway, one a request.
        gains: [num_drafts + 1] float64, accepted drafts, by the number verified.
        costs_ms: [num_drafts + 1] float64, of the whole step.
    """
    return int(((num_sampling_reqs + gains) / costs_ms).argmax())


def _expected_gains_numpy(
    past_confidences: np.ndarray, num_drafts_np: np.ndarray, num_drafts: int
) -> np.ndarray:
    num_rounds, _, max_drafts = past_confidences.shape
    survivals = past_confidences.cumprod(axis=2)
    survivals *= np.arange(max_drafts) < num_drafts_np[:, None]
    ranked = np.sort(-survivals.reshape(num_rounds, -1), axis=1)[:, :num_drafts]
    gains = np.zeros(num_drafts + 1)
    gains[1:] = -ranked.cumsum(axis=1).mean(axis=0)
    return gains
