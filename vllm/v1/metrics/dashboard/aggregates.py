"""Bounded sums and samples of what the engine reports."""

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from vllm.v1.metrics.dashboard.data import (
    BatchSizeData,
    CostData,
    LatencyData,
    PositionData,
    SecondData,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.calibration import Calibration
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    StepCost,
    VerificationStats,
)

NUM_SECONDS = 300
_NUM_COST_POINTS = 400
_NUM_LATENCIES = 1024


class BatchSizeTable:
    """What drafts came to, by the size of the batch in powers of two."""

    def __init__(self) -> None:
        # 1, 2, 3 to 4, 5 to 8 and so on: as many as a number of requests has bits.
        self._rows: dict[int, BatchSizeData] = {}

    def observe(
        self, verification: VerificationStats, drafts: SpecDecodingStats | None
    ) -> None:
        """Take one step; None stands for no drafts."""
        num_reqs = verification.num_sampling_reqs
        if num_reqs == 0:
            return
        level = (num_reqs - 1).bit_length()
        row = self._rows.get(level)
        if row is None:
            min_reqs = 1 if level == 0 else 2 ** (level - 1) + 1
            row = self._rows[level] = BatchSizeData(min_reqs, 2**level)
        row.num_steps += 1
        row.num_reqs += num_reqs
        row.draft_budget += verification.draft_budget
        if drafts is not None:
            row.num_draft_tokens += drafts.num_draft_tokens
            row.num_admitted_tokens += drafts.num_admitted_tokens
            row.num_accepted_tokens += drafts.num_accepted_tokens

    def get(self) -> list[BatchSizeData]:
        """Return the rows, small batches first."""
        return [self._rows[level] for level in sorted(self._rows)]


class CostRecord:
    """Predicted times of steps beside measured ones."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._predicted_s = 0.0
        self._measured_s = 0.0
        self._points: deque[StepCost] = deque(maxlen=_NUM_COST_POINTS)

    def observe(self, cost: StepCost) -> None:
        """Take one step."""
        self._num_steps += 1
        self._predicted_s += cost.predicted_s
        self._measured_s += cost.measured_s
        self._points.append(cost)

    def get(self) -> CostData:
        """Return the sums, and the last steps."""
        errors = [
            abs(cost.predicted_s - cost.measured_s) / cost.measured_s
            for cost in self._points
            if cost.measured_s > 0
        ]
        return CostData(
            self._num_steps,
            self._predicted_s,
            self._measured_s,
            sum(errors) / len(errors) if errors else None,
            [
                (cost.num_tokens, cost.predicted_s * 1e3, cost.measured_s * 1e3)
                for cost in self._points
            ],
        )


class Timeline:
    """Sums of each of the last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[SecondData] = deque(maxlen=NUM_SECONDS)

    def observe(self, now_s: float, stats: SchedulerStats) -> None:
        """Take one step.

        Args:
            now_s: seconds, never less than before.
        """
        second = math.floor(now_s)
        # `age_s` of a kept second is when it was; only `get` tells how long ago.
        if not self._seconds or self._seconds[-1].age_s != second:
            self._seconds.append(SecondData(second, 0, 0, 0, 0, 0, 0))
        last = self._seconds[-1]
        last.num_prompt_tokens += stats.step_prompt_tokens
        last.num_generation_tokens += stats.step_generation_tokens
        last.num_running_reqs = max(last.num_running_reqs, stats.num_running_reqs)
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            last.num_draft_tokens += drafts.num_draft_tokens
            last.num_admitted_tokens += drafts.num_admitted_tokens
            last.num_accepted_tokens += drafts.num_accepted_tokens

    def get(self, now_s: float) -> list[SecondData]:
        """Return the seconds, the oldest first."""
        second = math.floor(now_s)
        return [
            msgspec.structs.replace(entry, age_s=second - entry.age_s)
            for entry in self._seconds
            if second - entry.age_s < NUM_SECONDS
        ]


class LatencySample:
    """The last values of one kind of latency, in seconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_NUM_LATENCIES)

    def observe(self, values: Iterable[float]) -> None:
        """Take values, the oldest first."""
        self._values.extend(values)

    def get(self) -> LatencyData:
        """Return quantiles: each the least value that its share does not exceed."""
        values = sorted(self._values)

        def quantile(share: float) -> float | None:
            if not values:
                return None
            return values[max(math.ceil(share * len(values)) - 1, 0)]

        return LatencyData(len(values), quantile(0.5), quantile(0.9), quantile(0.99))


def describe_positions(
    drafts: SpecDecodingStats, calibration: Calibration
) -> list[PositionData]:
    """Lay the counts of each place in a proposal beside its calibration."""
    positions = []
    for position, error in enumerate(calibration.errors()):
        num_pairs = calibration.num_pairs[position]
        predicted = calibration.predicted[position]
        happened = calibration.happened[position]
        total = num_pairs.sum()
        positions.append(
            PositionData(
                num_admitted=drafts.num_admitted_tokens_per_pos[position],
                num_accepted=drafts.num_accepted_tokens_per_pos[position],
                predicted=float(predicted.sum() / total) if total else None,
                happened=float(happened.sum() / total) if total else None,
                error=error,
                bins=[
                    (float(sum_ / count), float(hits / count), float(count))
                    for count, sum_, hits in zip(
                        num_pairs, predicted, happened, strict=True
                    )
                    if count
                ],
            )
        )
    return positions
