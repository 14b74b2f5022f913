"""What speculation did: drafts offered, verified and accepted."""

from typing import NamedTuple, Self

import msgspec

from vllm.logger import init_logger

logger = init_logger(__name__)


class SpecDecodingStep(NamedTuple):
    """What became of one request's drafts in one step that had some.

    Args:
        num_verified: drafts that were neither trimmed nor forbidden by a grammar.
        num_accepted: at most `num_verified`.
    """

    num_verified: int
    num_accepted: int


class SpecDecodingStats(msgspec.Struct, array_like=True):
    """Counts of one step, or of several.

    Args:
        num_accepted_tokens_per_pos: accepted drafts by place in the proposal; as long
            as a proposal can be.
        num_admitted_tokens_per_pos: verified drafts, likewise.
        num_drafts: proposals, one a request and step, also if none was verified.
        num_draft_tokens: drafts that no grammar forbids.
        num_admitted_tokens: those of them that were verified; the rest was trimmed.
        num_accepted_tokens: those of them that were accepted.
    """

    num_accepted_tokens_per_pos: list[int]
    num_admitted_tokens_per_pos: list[int]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_admitted_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def make(cls, num_speculative_tokens: int) -> Self:
        """Return the counts of nothing."""
        return cls([0] * num_speculative_tokens, [0] * num_speculative_tokens)

    def observe(self, num_draft_tokens: int, step: SpecDecodingStep) -> None:
        """Count one request's proposal."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_admitted_tokens += step.num_verified
        self.num_accepted_tokens += step.num_accepted
        for position in range(step.num_verified):
            self.num_admitted_tokens_per_pos[position] += 1
        for position in range(step.num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    def add(self, other: Self) -> None:
        """Count another step's too."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_admitted_tokens += other.num_admitted_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for position, count in enumerate(other.num_admitted_tokens_per_pos):
            self.num_admitted_tokens_per_pos[position] += count
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count


class VerificationStats(msgspec.Struct, array_like=True):
    """What one step was to verify.

    Args:
        num_sampling_reqs: requests that got a token.
        num_scheduled_drafts: drafts that there were.
        draft_budget: those of them that were verified, also if a grammar forbids them.
    """

    num_sampling_reqs: int
    num_scheduled_drafts: int
    draft_budget: int


class StepCost(NamedTuple):
    """What one step was expected to cost, and what it did.

    Args:
        num_tokens: that the model computed.
        predicted_s: before the step.
        measured_s: from the step's beginning to that of the next.
    """

    num_tokens: int
    predicted_s: float
    measured_s: float


class SpecDecodingLogging:
    """The periodic line about speculation; other programs parse it."""

    def __init__(self) -> None:
        self._stats: SpecDecodingStats | None = None

    def observe(self, stats: SpecDecodingStats) -> None:
        """Take one step's counts."""
        if self._stats is None:
            num_positions = len(stats.num_accepted_tokens_per_pos)
            self._stats = SpecDecodingStats.make(num_positions)
        self._stats.add(stats)

    def log(self, seconds: float) -> None:
        """Write what came together since the last call, if anything did.

        Args:
            seconds: since the last call.
        """
        stats, self._stats = self._stats, None
        if stats is None or stats.num_drafts == 0:
            return
        rates = ", ".join(
            f"{count / stats.num_drafts:.3f}"
            for count in stats.num_accepted_tokens_per_pos
        )
        num_admitted_tokens = max(stats.num_admitted_tokens, 1)
        logger.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, "
            "Accepted throughput: %.2f tokens/s, Drafted throughput: %.2f tokens/s, "
            "Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%, "
            "Admitted: %d tokens",
            1 + stats.num_accepted_tokens / stats.num_drafts,
            stats.num_accepted_tokens / seconds,
            stats.num_draft_tokens / seconds,
            stats.num_accepted_tokens,
            stats.num_draft_tokens,
            rates,
            # A draft that was trimmed is not a rejected one.
            100 * stats.num_accepted_tokens / num_admitted_tokens,
            stats.num_admitted_tokens,
        )
