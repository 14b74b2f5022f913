"""What an answer tells of its own making, if the server was started with that."""

import msgspec


class SpeculativeDecodingMetrics(msgspec.Struct):
    """What became of a request's drafts.

    Args:
        mean_acceptance_length: tokens a step, the model's own one included.
        draft_acceptance_rate: accepted drafts / verified ones, 0 to 1.
        acceptance_histogram: [num_spec_tokens + 1] steps by accepted drafts.
        acceptance_histogram_by_draft_length: the same for each number of verified
            drafts that has occurred, as long as that number + 1.
        num_spec_steps: steps that drafts were scheduled for.
        num_draft_tokens: verified drafts; not those that a grammar forbids.
        num_spec_tokens: drafts that a step of this server can have.
        per_step_accepted: one number a step; only in detailed metrics.
        per_step_drafted: verified drafts, likewise.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | msgspec.UnsetType = msgspec.UNSET
    per_step_drafted: list[int] | msgspec.UnsetType = msgspec.UNSET


class RequestMetrics(msgspec.Struct):
    """Times of a request in milliseconds, and its drafts; null for what is not known.

    Args:
        time_to_first_token_ms: from arrival.
        generation_time_ms: from the first token to the last.
        queue_time_ms: from arrival in the engine to the first step.
        mean_itl_ms: generation time / tokens after the first.
        tokens_per_second: tokens after the first / generation time.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecodingMetrics | None = None
