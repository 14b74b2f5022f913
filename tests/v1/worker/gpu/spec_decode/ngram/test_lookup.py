import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.ngram import lookup

both = pytest.mark.parametrize(
    "impl",
    [lookup._propose_ngram_torch, lookup._propose_ngram_triton],
    ids=["torch", "triton"],
)


def propose_all(impl, rows, device, num_drafts=3, shortest=2, longest=3):
    width = max(map(len, rows)) + 4
    tokens = torch.full((len(rows), width), 777, dtype=torch.int32, device=device)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values, dtype=torch.int32)
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32, device=device)
    index = torch.arange(len(rows), dtype=torch.int32, device=device)
    results = impl(tokens, lengths, index, width, shortest, longest, num_drafts)
    return [result.tolist() for result in results]


def propose(*args):
    """Return the drafts and their number."""
    return tuple(propose_all(*args)[:2])


@both
def test_drafts_are_what_followed_the_suffix(impl, device):
    assert propose(impl, [[1, 2, 3, 4, 5, 9, 1, 2]], device) == ([[3, 4, 5]], [3])


@both
def test_a_longer_match_wins_over_a_later_one(impl, device):
    row = [7, 1, 2, 50, 60, 1, 2, 70, 80, 7, 1, 2]
    assert propose(impl, [row], device)[0] == [[50, 60, 1]]


@both
def test_of_equal_matches_the_latest_wins(impl, device):
    row = [8, 1, 2, 50, 9, 1, 2, 60, 61, 62, 7, 1, 2]
    assert propose(impl, [row], device)[0] == [[60, 61, 62]]


@both
def test_drafts_end_with_the_known_tokens(impl, device):
    # After the match only 1, 2 follow; unknown tokens behind them are not copied.
    assert propose(impl, [[1, 2, 1, 2]], device) == ([[1, 2, -1]], [2])


@both
def test_no_match_gives_no_draft(impl, device):
    rows = [[1, 2, 3, 4, 5], [1], [4, 2, 3, 1, 2]]
    assert propose(impl, rows, device) == ([[-1] * 3] * 3, [0, 0, 0])


@both
def test_rows_are_found_by_the_mapping(impl, device):
    tokens = torch.tensor([[1, 1, 1, 1], [5, 6, 5, 6]], dtype=torch.int32)
    drafts, counts, _ = impl(
        tokens.to(device),
        torch.tensor([4, 4], dtype=torch.int32, device=device),
        torch.tensor([1], dtype=torch.int32, device=device),
        4,
        2,
        2,
        1,
    )
    assert (drafts.tolist(), counts.tolist()) == ([[5]], [1])


@both
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Longer than a suffix that is looked for.
        ([3, 9, 8, 7, 6, 1, 2, 40, 9, 8, 7, 6, 1, 2], 6),
        # The text begins within it.
        ([8, 1, 2, 3, 40, 50, 8, 1, 2, 3], 4),
        # Two places overlap.
        ([5] * 10, 9),
        ([1, 2, 30, 40, 1, 2], 2),
        ([1, 2, 3, 4, 5], 0),
        ([1], 0),
        ([7, *range(100, 140), 8, *range(100, 140)], lookup.MAX_MATCH_LEN),
    ],
)
def test_a_match_is_measured_as_far_as_it_goes(impl, row, expected, device):
    assert propose_all(impl, [row], device)[2] == [expected]


@pytest.mark.parametrize("length", [1, 2, 40, 1030])
def test_the_kernel_matches_its_twin(length, device):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 3, (4, length + 8), generator=generator)
    tokens = tokens.to(torch.int32).to(device)
    lengths = torch.tensor([length, 1, length, max(length - 1, 1)], dtype=torch.int32)
    rows = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
    arguments = (tokens, lengths.to(device), rows, length + 3, 2, 4, 5)
    for actual, expected in zip(
        lookup._propose_ngram_triton(*arguments),
        lookup._propose_ngram_torch(*arguments),
        strict=True,
    ):
        assert torch.equal(actual, expected)
