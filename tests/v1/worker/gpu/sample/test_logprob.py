import math

import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.sample.logprob import (
    PADDING_TOKEN_ID,
    _likeliest_by_key,
    _likeliest_by_value,
    _logprob_stats_torch,
    _logprob_stats_triton,
    _place_chosen_token_ids_torch,
    _place_chosen_token_ids_triton,
    compute_topk_scores,
    logprob_stats,
)
from vllm.v1.worker.gpu.sample.ragged import RaggedRows

PROBABILITIES = [0.1, 0.5, 0.15, 0.25]


@pytest.fixture
def logits(device) -> torch.Tensor:
    # A constant does not change the log-probabilities.
    return torch.tensor([PROBABILITIES, PROBABILITIES], device=device).log() + 3.0


def _tokens(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def test_the_first_column_is_the_sampled_token_then_come_the_likeliest(logits, device):
    scores = compute_topk_scores(logits, 2, _tokens([2, 1], device))
    assert scores.logprob_token_ids.tolist() == [[2, 1, 3], [1, 1, 3]]
    expected = [math.log(p) for p in (0.15, 0.5, 0.25, 0.5, 0.5, 0.25)]
    assert scores.logprobs.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert scores.selected_token_ranks.tolist() == [3, 1]
    assert scores[3:] == (None, None)


def test_without_candidates_there_is_the_sampled_token_alone(logits, device):
    scores = compute_topk_scores(logits, 0, _tokens([3, 0], device))
    assert scores.logprob_token_ids.tolist() == [[3], [0]]
    assert scores.selected_token_ranks.tolist() == [2, 4]


def test_the_candidates_may_be_the_whole_vocabulary(logits, device):
    scores = compute_topk_scores(logits, 100, _tokens([0, 0], device))
    assert scores.logprob_token_ids[0].tolist() == [0, 1, 3, 2, 0]
    total = scores.logprobs[:, 1:].exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def _with_ties(device: torch.device) -> torch.Tensor:
    torch.manual_seed(0)
    logits = torch.randn(6, 300, device=device)
    logits[1] = (3 * logits[1]).round()
    logits[2] = 0.0
    logits[3, 7:290] = float("-inf")
    # Equal, though not in their bits.
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    return logits


@pytest.mark.parametrize("find", [_likeliest_by_key, _likeliest_by_value])
@pytest.mark.parametrize("num_candidates", [1, 2, 9, 20, 299])
def test_of_equal_candidates_the_lower_id_comes_first(find, num_candidates, device):
    logits = _with_ties(device)
    by_sorting = logits.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(find(logits, num_candidates), by_sorting[:, :num_candidates])


def test_fewer_candidates_are_the_first_of_more(device):
    logits = _with_ties(device)
    tokens = _tokens([0] * len(logits), device)
    widest = compute_topk_scores(logits, 300, tokens)
    for num_candidates in (1, 5, 250):
        scores = compute_topk_scores(logits, num_candidates, tokens)
        for narrow, wide in zip(scores[:2], widest[:2], strict=True):
            assert torch.equal(narrow, wide[:, : 1 + num_candidates])


def test_what_is_no_number_has_one_place_however_many_are_wanted(device):
    logits = torch.tensor([[1.0, math.nan, 3.0, 2.0]], device=device)
    few, all_of_them = (
        compute_topk_scores(logits, count, _tokens([2], device)) for count in (2, 4)
    )
    expected = all_of_them.logprob_token_ids[:, :3].tolist()
    assert few.logprob_token_ids.tolist() == expected


def test_logits_mode_gives_the_logits(logits, device):
    scores = compute_topk_scores(logits, 1, _tokens([2, 1], device), logits_mode=True)
    assert torch.equal(scores.logprobs[:, 0], logits[[0, 1], [2, 1]])


def test_equal_logits_share_the_best_rank(device):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]], device=device).repeat(4, 1)
    ranks = compute_topk_scores(logits, 0, _tokens([0, 1, 2, 3], device))[2]
    assert ranks.tolist() == [3, 1, 1, 4]


def test_host_and_device_boundaries_have_their_own_fields(logits, device):
    tokens = _tokens([0, 0], device)
    assert compute_topk_scores(logits, 0, tokens, [0, 2])[3:] == ([0, 2], None)
    boundaries = torch.tensor([0, 2], dtype=torch.int32, device=device)
    scores = compute_topk_scores(logits, 0, tokens, boundaries)
    boundaries.zero_()
    assert scores.cu_num_generated_tokens is None
    assert scores.cu_num_generated_tokens_tensor.tolist() == [0, 2]


def test_a_token_that_is_out_has_minus_infinity(device):
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], device=device)
    scores = compute_topk_scores(logits, 2, _tokens([1], device))
    assert scores.logprobs[0, 0] == float("-inf")
    assert scores.selected_token_ranks.tolist() == [3]


def test_a_row_without_a_token_reads_nothing_outside(logits, device):
    scores = compute_topk_scores(logits, 1, _tokens([-1, 1], device))
    assert scores.logprob_token_ids[1].tolist() == [1, 1]


def _chosen(device: torch.device) -> RaggedRows:
    chosen = RaggedRows(3, (torch.int32,), device)
    chosen.set_row(1, np.array([3, 0]))
    chosen.set_row(2, np.array([1, 2, 0]))
    chosen.apply_staged_writes()
    return chosen


@pytest.mark.parametrize(
    "place",
    [_place_chosen_token_ids_torch, _place_chosen_token_ids_triton],
    ids=["torch", "triton"],
)
def test_chosen_candidates_replace_the_likeliest(place, device):
    token_ids = torch.full((3, 4), 9, device=device)
    rows = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    place(token_ids, rows, _chosen(device))
    padding = PADDING_TOKEN_ID
    assert token_ids.tolist() == [[9, 3, 0, padding], [9, 9, 9, 9], [9, 1, 2, 0]]


def test_chosen_candidates_have_their_own_scores(logits, device):
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    scores = compute_topk_scores(
        logits,
        3,
        _tokens([1, 1], device),
        chosen_token_ids=_chosen(device),
        expanded_idx_mapping=rows,
    )
    assert scores.logprob_token_ids.tolist() == [[1, 3, 0, -1], [1, 1, 3, 2]]
    expected = [math.log(0.5), math.log(0.25), math.log(0.1), float("-inf")]
    assert scores.logprobs[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "impl", [_logprob_stats_triton, logprob_stats], ids=["triton", "public"]
)
@pytest.mark.parametrize("vocab_size", [1, 2047, 2048, 4097])
def test_every_path_matches_the_reference(impl, vocab_size, device):
    torch.manual_seed(0)
    logits = torch.randn(4, vocab_size, device=device) * 5
    logits[2] = logits[2].round()
    logits[3, 1:] = float("-inf")
    token_ids = torch.randint(0, vocab_size, (4,), device=device)
    logsumexp, rank = _logprob_stats_torch(logits, token_ids)
    actual_logsumexp, actual_rank = impl(logits, token_ids)
    assert torch.equal(actual_rank, rank)
    # Float32 sums in another order.
    torch.testing.assert_close(actual_logsumexp, logsumexp, rtol=1e-5, atol=1e-5)
