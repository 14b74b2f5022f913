"""How many of a step's drafts were put to the test, request by request."""

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


def count_verified_drafts(
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
    grammar_output: GrammarOutput | None,
) -> dict[str, int]:
    """Leave out the drafts that the worker trimmed and those that a grammar forbids.

    Neither says anything about the drafter, so neither counts as rejected.

    Args:
        grammar_output: the step's mask; None if nothing is constrained.

    Returns:
        An entry for each request that drafts were scheduled for, 0 included.
    """
    num_verified = {
        req_id: len(drafts)
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
    }
    limits = list(model_runner_output.num_verified_drafts.items())
    if grammar_output is not None and grammar_output.num_acceptable_drafts is not None:
        limits += zip(
            grammar_output.structured_output_request_ids,
            grammar_output.num_acceptable_drafts,
            strict=True,
        )
    for req_id, limit in limits:
        if req_id in num_verified:
            num_verified[req_id] = min(num_verified[req_id], limit)
    return num_verified
