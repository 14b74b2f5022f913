"""What a caller of the offline API or of the asynchronous engine receives."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """The log-probability of one token at one position.

    Args:
        logprob: natural logarithm; -inf for a token that cannot be drawn.
        rank: 1 for the most likely token; None if not computed.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict a position: token id -> Logprob. The first position of a prompt has none.
SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Times of one request, in seconds of a monotonic clock, and its token count."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """The state of one request: its prompt and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
