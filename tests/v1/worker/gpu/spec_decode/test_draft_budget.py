import itertools

import numpy as np
import pytest

from vllm.v1.worker.gpu.spec_decode.draft_budget import (
    choose_draft_budget,
    expected_gains,
)


def _gains(*rounds, num_drafts=None):
    past = np.array(rounds, dtype=np.float64)
    if num_drafts is None:
        num_drafts = [past.shape[2]] * past.shape[1]
    return expected_gains(past, np.array(num_drafts, dtype=np.int32))


def test_the_likeliest_drafts_of_all_requests_count_first():
    # Survivals: 0.9, 0.45 and 0.8, 0.08.
    gains = _gains([[0.9, 0.5], [0.8, 0.1]])
    np.testing.assert_allclose(gains, [0.0, 0.9, 1.7, 2.15, 2.23])


def test_a_request_counts_with_the_drafts_that_it_has():
    gains = _gains([[0.9, 0.5], [0.8, 0.1], [1.0, 1.0]], num_drafts=[2, 1, 0])
    np.testing.assert_allclose(gains, [0.0, 0.9, 1.7, 2.15])


def test_rounds_are_ranked_each_for_itself_and_then_averaged():
    # Ranked by their means, both requests would look alike, and 0.5 each.
    gains = _gains([[1.0], [0.0]], [[0.0], [1.0]])
    np.testing.assert_allclose(gains, [0.0, 1.0, 1.0])


def test_without_drafts_there_is_nothing_to_gain():
    past = np.zeros((2, 0, 3))
    assert expected_gains(past, np.zeros(0, dtype=np.int32)).tolist() == [0.0]


def _best_of_all_prefixes(confidences, costs_ms):
    """Return the tokens a second of the best way to cut each request's drafts."""
    num_reqs, max_drafts = confidences.shape
    rates = []
    for lengths in itertools.product(range(max_drafts + 1), repeat=num_reqs):
        tokens = num_reqs + sum(
            confidences[request, :length].cumprod().sum()
            for request, length in enumerate(lengths)
        )
        rates.append(tokens / costs_ms[sum(lengths)])
    return max(rates)


@pytest.mark.parametrize("seed", range(8))
def test_no_set_of_prefixes_is_better_than_the_one_chosen(seed):
    generator = np.random.default_rng(seed)
    confidences = generator.random((3, 4))
    # Stairs, so that the best number need not be the first local one.
    costs_ms = 1 + generator.integers(0, 4, 13).cumsum() * generator.random() / 4
    gains = _gains(confidences)
    budget = choose_draft_budget(3, gains, costs_ms)
    rate = (3 + gains[budget]) / costs_ms[budget]
    assert rate == pytest.approx(_best_of_all_prefixes(confidences, costs_ms))


def test_a_stair_behind_a_worse_one_is_found():
    gains = np.array([0.0, 1.0, 2.0, 3.0])
    # One token is dear, and the two behind it cost nothing more.
    assert choose_draft_budget(1, gains, np.array([1.0, 2.5, 2.5, 2.5])) == 3


def test_where_tokens_cost_nothing_every_draft_is_verified():
    gains = _gains([[0.5, 0.5, 0.1]] * 4)
    assert choose_draft_budget(4, gains, np.full(13, 7.0)) == 12


def test_where_tokens_cost_all_none_is():
    gains = _gains([[0.99, 0.99]] * 4)
    costs_ms = 4.0 + np.arange(9.0)
    assert choose_draft_budget(4, gains, costs_ms) == 0


def test_what_every_step_costs_anyway_never_makes_the_budget_smaller():
    generator = np.random.default_rng(0)
    for _ in range(20):
        gains = _gains(generator.random((3, 4)))
        costs_ms = 1 + generator.random(13).cumsum()
        budgets = [
            choose_draft_budget(3, gains, costs_ms + fixed) for fixed in (0, 1, 10, 100)
        ]
        assert budgets == sorted(budgets)


def test_prompts_that_sample_nothing_earn_nothing():
    # Eight requests, of which one samples: the eighth token is that much dearer.
    gains = np.array([0.0, 0.5])
    costs_ms = np.array([10.0, 12.0])
    assert choose_draft_budget(1, gains, costs_ms) == 1
    assert choose_draft_budget(8, gains, costs_ms) == 0
