"""How requests share the steps."""

from dataclasses import dataclass

SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    Args:
        max_num_batched_tokens: tokens of a step, prompts and outputs together.
        max_num_seqs: requests of a step, and rows in the worker.
        enable_chunked_prefill: a prompt may be spread over steps. If off, a prompt is
            computed whole, and must fit max_num_batched_tokens.
        policy: one of SCHEDULING_POLICIES.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
