from vllm.v1.spec_decode import metrics
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingStats,
    SpecDecodingStep,
)


def stats(*proposals: tuple[int, int, int]) -> SpecDecodingStats:
    """Count proposals of (drafted, verified, accepted) tokens."""
    counts = SpecDecodingStats.make(3)
    for num_drafted, num_verified, num_accepted in proposals:
        counts.observe(num_drafted, SpecDecodingStep(num_verified, num_accepted))
    return counts


def test_tokens_by_position_sum_to_all_of_them():
    counts = stats((3, 3, 2), (3, 2, 0), (1, 1, 1), (2, 0, 0))
    assert (counts.num_drafts, counts.num_draft_tokens) == (4, 9)
    assert counts.num_admitted_tokens_per_pos == [3, 2, 1]
    assert sum(counts.num_admitted_tokens_per_pos) == counts.num_admitted_tokens == 6
    assert counts.num_accepted_tokens_per_pos == [2, 1, 0]
    assert sum(counts.num_accepted_tokens_per_pos) == counts.num_accepted_tokens == 3


def test_the_counts_of_two_steps_are_those_of_all_their_proposals():
    first, second = stats((3, 3, 2), (3, 1, 0)), stats((2, 2, 2))
    first.add(second)
    assert first == stats((3, 3, 2), (3, 1, 0), (2, 2, 2))


def test_the_line_is_word_for_word_what_parsers_expect(monkeypatch):
    lines = []
    monkeypatch.setattr(
        metrics.logger, "info", lambda text, *args: lines.append(text % args)
    )
    line = SpecDecodingLogging()
    line.observe(stats((3, 3, 2)))
    line.observe(stats((3, 1, 1)))
    line.log(2.0)
    line.log(2.0)
    assert lines == [
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 "
        "tokens/s, Drafted throughput: 3.00 tokens/s, Accepted: 3 tokens, Drafted: 6 "
        "tokens, Per-position acceptance rate: 1.000, 0.500, 0.000, Avg Draft "
        "acceptance rate: 75.0%, Admitted: 4 tokens"
    ]
