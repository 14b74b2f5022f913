"""What a step of any size costs: measured curves, corrected by the steps that ran."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

import numpy as np

from vllm.config.cost_profile import CostProfile
from vllm.v1.worker.gpu.spec_decode.cost_correction import CostCorrection

CurveSamples = Mapping[int, float] | Iterable[tuple[int, float]]

_DRAFT_FLOOR_MS = 0.0
# A step that verifies takes time, whatever a clock says: costs are divided by.
_VERIFY_FLOOR_MS = 1e-6
# Steps that are learnt from at a time: the code that does it is then fetched from
# memory once, and the tables are made anew once.
_STEPS_PER_REFRESH = 8


class _Observation(NamedTuple):
    """A step that ran, as `CostModel.observe` was told."""

    num_draft_reqs: int
    num_tokens: int
    step_ms: float
    num_next_drafts: int


class CostModel:
    """Predicts the milliseconds of a whole step, for any budget at once.

    A step that verifies and then drafts costs draft[drafts, requests] + verify[tokens];
    both tables begin as they were measured and follow the steps that are observed.

    Args:
        draft_cost_ms: [max_num_reqs + 1] float64, non-decreasing, of all drafts that
            requests can have.
        verify_cost_ms: [max_batch_tokens + 1] float64, non-decreasing, > 0.
        num_speculative_tokens: drafts that a request can have.
        single_draft_cost_ms: as `draft_cost_ms`, of one draft for each request; None:
            any number costs the same.
    """

    def __init__(
        self,
        draft_cost_ms: np.ndarray,
        verify_cost_ms: np.ndarray,
        num_speculative_tokens: int,
        single_draft_cost_ms: np.ndarray | None = None,
    ) -> None:
        single = draft_cost_ms
        if single_draft_cost_ms is not None:
            single = np.minimum(single_draft_cost_ms, draft_cost_ms)
        # By the number of drafts: where it stands between one and all.
        self._length_shares = np.ones(1 + num_speculative_tokens)
        if num_speculative_tokens > 1:
            self._length_shares[1:] = np.linspace(0.0, 1.0, num_speculative_tokens)
        shares = self._length_shares[:, None]
        # By the number of drafts, then of requests.
        self._measured_draft = single + shares * (draft_cost_ms - single)
        self._measured_draft[0] = 0.0
        # Nobody to draft for.
        self._measured_draft[:, 0] = 0.0
        self._measured_verify = verify_cost_ms
        self._draft = self._measured_draft
        self._verify = self._measured_verify
        self._correction = CostCorrection(len(single) - 1, len(verify_cost_ms) - 1)
        # That nothing was learnt from yet, in their order.
        self._observed: list[_Observation] = []

    @classmethod
    def from_profile(
        cls,
        profile: CostProfile,
        max_num_reqs: int,
        max_batch_tokens: int,
        num_speculative_tokens: int,
    ) -> Self:
        """Build from measured curves."""
        limit = profile.cudagraph_limit
        draft, verify = build_cost_tables_from_curves(
            profile.draft_curve,
            profile.verify_curve,
            max_num_reqs,
            max_batch_tokens,
            limit,
        )
        single = None
        if profile.single_draft_curve:
            single = _fill_table(
                profile.single_draft_curve, max_num_reqs, limit, _DRAFT_FLOOR_MS
            )
        return cls(draft, verify, num_speculative_tokens, single)

    def step_costs(
        self,
        num_draft_reqs: int,
        num_non_draft_tokens: int,
        max_drafts: int,
        num_next_drafts: int,
    ) -> np.ndarray:
        """Return what a step costs that verifies 0, 1, ... drafts and then drafts.

        Args:
            num_draft_reqs: requests that are drafted for.
            num_non_draft_tokens: tokens beside the drafts.
            max_drafts: the most drafts to verify.
            num_next_drafts: that are drafted for each request.

        Returns:
            [max_drafts + 1] float64, ms, non-decreasing.
        """
        end = num_non_draft_tokens + max_drafts + 1
        assert end <= len(self._verify), "more tokens than a step can have"
        drafting = self._draft[num_next_drafts, num_draft_reqs]
        return self._verify[num_non_draft_tokens:end] + drafting

    def step_cost_without_drafting(self, num_non_draft_tokens: int) -> float:
        """Return the ms of a step that verifies nothing and does not draft."""
        return float(self._verify[num_non_draft_tokens])

    def observe(
        self,
        num_draft_reqs: int,
        num_tokens: int,
        step_ms: float,
        num_next_drafts: int,
    ) -> None:
        """Learn from a step; nothing is learnt before the step after the next.

        The time of a step that drew drafts must not decide about those drafts.

        Args:
            num_draft_reqs: requests that were drafted for.
            num_tokens: of the step, verified drafts included.
            step_ms: of the whole step, from its start to the start of the next.
            num_next_drafts: that were drafted for each of them; 0: none.
        """
        if not step_ms > 0:
            return
        if len(self._observed) == _STEPS_PER_REFRESH:
            self._learn()
        self._observed.append(
            _Observation(num_draft_reqs, num_tokens, step_ms, num_next_drafts)
        )

    def _learn(self) -> None:
        """Correct the tables by what was observed."""
        for step in self._observed:
            num_reqs = step.num_draft_reqs if step.num_next_drafts else 0
            self._correction.observe(
                num_reqs,
                step.num_tokens,
                float(self._measured_draft[step.num_next_drafts, num_reqs]),
                float(self._measured_verify[step.num_tokens]),
                step.step_ms,
                float(self._length_shares[step.num_next_drafts]),
            )
        self._observed.clear()
        self._refresh()

    def _refresh(self) -> None:
        single_factors, full_factors, verify_factors = self._correction.factors()
        shares = self._length_shares[:, None]
        draft_factors = single_factors ** (1.0 - shares) * full_factors**shares
        self._draft = np.maximum.accumulate(
            self._measured_draft * draft_factors, axis=1
        )
        self._verify = np.maximum.accumulate(self._measured_verify * verify_factors)


def build_cost_tables_from_curves(
    draft_curve: CurveSamples,
    verify_curve: CurveSamples,
    max_num_reqs: int,
    max_batch_tokens: int,
    cudagraph_limit: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Fill the gaps between measured sizes, so that more work never costs less.

    Up to `cudagraph_limit` a step is padded to the next size that was measured, and
    costs what that costs. Beyond, costs are interpolated among the larger samples:
    what lies on the two sides of the limit is executed in two ways. In front of the
    first sample a curve is flat, behind the last it goes on as between the last two.

    Args:
        draft_curve: (requests, ms) samples; empty if drafting costs nothing.
        verify_curve: (tokens, ms) samples.
        max_num_reqs: last index of the first table.
        max_batch_tokens: last index of the second table.
        cudagraph_limit: the largest captured size; 0 where nothing is captured.

    Returns:
        draft_cost: [max_num_reqs + 1] float64, ms, at least 0.
        verify_cost: [max_batch_tokens + 1] float64, ms, at least 1e-6.
    """
    return (
        _fill_table(draft_curve, max_num_reqs, cudagraph_limit, _DRAFT_FLOOR_MS),
        _fill_table(verify_curve, max_batch_tokens, cudagraph_limit, _VERIFY_FLOOR_MS),
    )


def _fill_table(
    curve: CurveSamples, max_size: int, cudagraph_limit: int, floor_ms: float
) -> np.ndarray:
    samples = sorted(dict(curve).items())
    if not samples:
        return np.full(max_size + 1, floor_ms)
    sizes = np.array([size for size, _ in samples])
    costs = np.maximum.accumulate(np.array([ms for _, ms in samples], dtype=np.float64))
    table = np.empty(max_size + 1)
    wanted = np.arange(max_size + 1)

    is_captured = wanted <= cudagraph_limit
    next_sample = np.searchsorted(sizes, wanted[is_captured])
    table[is_captured] = costs[np.minimum(next_sample, len(sizes) - 1)]
    is_eager = sizes > cudagraph_limit
    if is_eager.any():
        table[~is_captured] = np.interp(
            wanted[~is_captured], sizes[is_eager], costs[is_eager]
        )
    slope = 0.0
    if len(sizes) > 1:
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
    is_behind = wanted > sizes[-1]
    table[is_behind] = costs[-1] + slope * (wanted[is_behind] - sizes[-1])
    return np.maximum(table, floor_ms)
