"""Counts that the engine core reports with each step, and the front's own."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm.outputs import RequestStateStats
from vllm.v1.spec_decode.calibration import CalibrationStats
from vllm.v1.spec_decode.metrics import (
    SpecDecodingStats,
    StepCost,
    VerificationStats,
)

if TYPE_CHECKING:
    # The messages hold SchedulerStats, so this module cannot import them for real.
    from vllm.v1.engine import EngineCoreOutput


class PrefixCacheStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """Look-ups in the prefix cache since the last report, in tokens.

    Args:
        reset: the cache was cleared since the last report.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    reset: bool = False


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """The state of the scheduler after a step.

    Args:
        kv_cache_usage: share of the blocks in use, 0 to 1.
        num_preempted: requests preempted in this step.
        step_prompt_tokens: prompt tokens computed in this step.
        step_generation_tokens: tokens sampled in this step.
        spec_decoding_stats: since the last report; None if there were no drafts.
        verification: of this step; None without speculation, likewise the others.
        step_cost: of the last step whose time has been predicted and is known; None if
            it was reported before.
        calibration: pairs since the last report, from time to time.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_for_grammar_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = msgspec.field(
        default_factory=PrefixCacheStats
    )
    num_preempted: int = 0
    step_prompt_tokens: int = 0
    step_generation_tokens: int = 0
    num_corrupted_reqs: int = 0
    spec_decoding_stats: SpecDecodingStats | None = None
    verification: VerificationStats | None = None
    step_cost: StepCost | None = None
    calibration: CalibrationStats | None = None


@dataclass(frozen=True)
class FinishedRequestStats:
    """One finished sequence; times in seconds.

    Args:
        finish_reason: as the API shows it.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        max_tokens_param: the limit that was in force.
        queued_time: from arrival in the engine core to the first step.
        prefill_time: from the first step to the first token.
        decode_time: from the first token to the last.
        inference_time: from the first step to the last token.
        mean_time_per_output_token: over the tokens after the first.
    """

    finish_reason: str
    e2e_latency: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_tokens_param: int | None
    queued_time: float
    prefill_time: float
    decode_time: float
    inference_time: float
    mean_time_per_output_token: float


@dataclass(frozen=True)
class ParentRequestStats:
    """One request of the API, which has n sequences."""

    n_param: int
    max_num_generation_tokens: int


@dataclass
class IterationStats:
    """What one batch of outputs meant for the requests.

    Args:
        now: seconds of `time.time()`, the clock of arrivals.
        time_to_first_tokens: from arrival, so with queueing and grammar compilation.
    """

    now: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    finished_parents: list[ParentRequestStats] = field(default_factory=list)

    def update_from_prompt(
        self, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """Count one sequence's prompt, once it is computed."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_prompt_tokens += num_cached_tokens

    def update_from_output(
        self, output: "EngineCoreOutput", timestamp: float, stats: RequestStateStats
    ) -> None:
        """Count one sequence's output and note its times.

        Args:
            timestamp: when the step ended, seconds of the engine core's clock.
            stats: of the sequence, changed in place.
        """
        for event in output.events or ():
            # The first mark of a kind counts: a preempted request was not queued twice.
            if event.type.name == "QUEUED":
                stats.queued_ts = stats.queued_ts or event.timestamp
            elif event.type.name == "SCHEDULED":
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp
        num_new_tokens = len(output.new_token_ids)
        if not num_new_tokens:
            return
        self.num_generation_tokens += num_new_tokens
        if stats.num_generation_tokens == 0:
            stats.first_token_latency = self.now - stats.arrival_time
            stats.first_token_ts = timestamp
            self.time_to_first_tokens.append(stats.first_token_latency)
        else:
            self.inter_token_latencies.append(timestamp - stats.last_token_ts)
        stats.num_generation_tokens += num_new_tokens
        stats.last_token_ts = timestamp

    def update_from_finished_request(
        self,
        finish_reason: str,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        max_tokens: int | None,
        stats: RequestStateStats,
    ) -> None:
        """Note that a sequence has ended."""
        decode_time = stats.last_token_ts - stats.first_token_ts
        num_later_tokens = stats.num_generation_tokens - 1
        has_tokens = stats.num_generation_tokens > 0
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                e2e_latency=self.now - stats.arrival_time,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=num_cached_tokens,
                num_generation_tokens=stats.num_generation_tokens,
                max_tokens_param=max_tokens,
                queued_time=max(stats.scheduled_ts - stats.queued_ts, 0.0),
                prefill_time=(
                    stats.first_token_ts - stats.scheduled_ts if has_tokens else 0.0
                ),
                decode_time=decode_time,
                inference_time=(
                    stats.last_token_ts - stats.scheduled_ts if has_tokens else 0.0
                ),
                mean_time_per_output_token=(
                    decode_time / num_later_tokens if num_later_tokens > 0 else 0.0
                ),
            )
        )
