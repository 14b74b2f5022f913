"""From the engine's statistics of a request to the `metrics` of its answer."""

import msgspec

from vllm.config import ObservabilityConfig
from vllm.entrypoints.openai.protocol.metrics import (
    RequestMetrics,
    SpeculativeDecodingMetrics,
)
from vllm.outputs import RequestStateStats, SpecDecodeMetrics


def make_request_metrics(
    config: ObservabilityConfig, stats: RequestStateStats | None, num_answers: int
) -> RequestMetrics | None | msgspec.UnsetType:
    """Return what an answer tells of its request.

    Args:
        stats: of the request at its end.
        num_answers: of the response; the numbers of several have no common meaning.

    Returns:
        None for several answers; UNSET if the server tells nothing at all.
    """
    if not (config.enable_per_request_metrics or config.has_spec_decode_metrics):
        return msgspec.UNSET
    if stats is None or num_answers != 1:
        return None
    metrics = RequestMetrics()
    if config.enable_per_request_metrics:
        _set_times(metrics, stats)
    if stats.spec_decode_metrics is not None:
        metrics.speculative_decoding = _describe_drafts(stats.spec_decode_metrics)
    return metrics


def _set_times(metrics: RequestMetrics, stats: RequestStateStats) -> None:
    # A request that only scores its prompt has no token.
    if stats.num_generation_tokens == 0:
        return
    generation_time = stats.last_token_ts - stats.first_token_ts
    metrics.time_to_first_token_ms = stats.first_token_latency * 1000
    metrics.generation_time_ms = generation_time * 1000
    metrics.queue_time_ms = max(stats.scheduled_ts - stats.queued_ts, 0.0) * 1000
    num_later_tokens = stats.num_generation_tokens - 1
    if num_later_tokens > 0 and generation_time > 0:
        metrics.mean_itl_ms = metrics.generation_time_ms / num_later_tokens
        metrics.tokens_per_second = num_later_tokens / generation_time


def _describe_drafts(metrics: SpecDecodeMetrics) -> SpeculativeDecodingMetrics:
    described = SpeculativeDecodingMetrics(
        mean_acceptance_length=metrics.mean_acceptance_length,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        acceptance_histogram=metrics.acceptance_histogram,
        acceptance_histogram_by_draft_length=dict(
            sorted(metrics.acceptance_histogram_by_draft_length.items())
        ),
        num_spec_steps=metrics.num_spec_steps,
        num_accepted_draft_tokens=metrics.num_accepted_draft_tokens,
        num_draft_tokens=metrics.num_draft_tokens,
        num_spec_tokens=metrics.num_spec_tokens,
    )
    if metrics.per_step_accepted is not None and metrics.per_step_drafted is not None:
        described.per_step_accepted = metrics.per_step_accepted
        described.per_step_drafted = metrics.per_step_drafted
    return described
