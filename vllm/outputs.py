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
class SpecDecodeMetrics:
    """What speculation did for one answer, step by step.

    A step counts here if drafts were scheduled for it, also if none of them was
    verified. A draft counts if it was verified: those that were trimmed, or that a
    grammar does not allow, are no failures of the drafter. One that was accepted counts
    also if it stands behind a stop, where the text does not show it.

    Args:
        num_spec_tokens: drafts that a step can have.
        acceptance_histogram_by_draft_length: for each number of verified drafts that
            has occurred, [verified + 1] steps by how many of them were accepted.
        per_step_accepted: one number a step, in order; None if they are not kept.
        per_step_drafted: verified drafts, likewise.
    """

    num_spec_tokens: int
    acceptance_histogram_by_draft_length: dict[int, list[int]] = field(
        default_factory=dict
    )
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None

    @classmethod
    def make(cls, num_spec_tokens: int, *, is_detailed: bool) -> "SpecDecodeMetrics":
        """Return the counts of an answer that has not begun.

        Args:
            is_detailed: keep the numbers of each step.
        """
        metrics = cls(num_spec_tokens)
        if is_detailed:
            metrics.per_step_accepted, metrics.per_step_drafted = [], []
        return metrics

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """Count one step."""
        counts = self.acceptance_histogram_by_draft_length.setdefault(
            num_verified, [0] * (num_verified + 1)
        )
        counts[num_accepted] += 1
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            self.per_step_accepted.append(num_accepted)
            self.per_step_drafted.append(num_verified)

    @property
    def acceptance_histogram(self) -> list[int]:
        """[num_spec_tokens + 1] steps by how many drafts were accepted."""
        histogram = [0] * (self.num_spec_tokens + 1)
        for counts in self.acceptance_histogram_by_draft_length.values():
            for num_accepted, num_steps in enumerate(counts):
                histogram[num_accepted] += num_steps
        return histogram

    @property
    def num_spec_steps(self) -> int:
        """Steps that drafts were scheduled for."""
        return sum(map(sum, self.acceptance_histogram_by_draft_length.values()))

    @property
    def num_draft_tokens(self) -> int:
        """Verified drafts."""
        return sum(
            num_verified * sum(counts)
            for num_verified, counts in (
                self.acceptance_histogram_by_draft_length.items()
            )
        )

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Accepted drafts."""
        return sum(
            num_accepted * num_steps
            for num_accepted, num_steps in enumerate(self.acceptance_histogram)
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step gave, the model's own one included; 1 without steps."""
        return 1 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the verified drafts that were accepted; 0 without any."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt.

    Args:
        spec_decode_metrics: of this answer so far, if the engine keeps them.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    spec_decode_metrics: SpecDecodeMetrics | None = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Times of one request, in seconds of a monotonic clock, and its counts.

    Args:
        spec_decode_metrics: if the engine keeps them and there is only one answer.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    spec_decode_metrics: SpecDecodeMetrics | None = None


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
