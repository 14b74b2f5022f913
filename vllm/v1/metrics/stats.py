"""Counts that the engine core reports with each step, and the front's own."""

import msgspec


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
