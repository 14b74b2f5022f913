import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.admitted_drafts import (
    _admit_drafts_torch,
    _admit_drafts_triton,
    admit_drafts,
)

NAN = float("nan")
all_forms = pytest.mark.parametrize(
    "impl",
    [_admit_drafts_torch, _admit_drafts_triton, admit_drafts],
    ids=["torch", "triton", "picked"],
)


def _admit(impl, confidences, num_drafts, budget, device, idx_mapping=None):
    confidences = torch.as_tensor(confidences, dtype=torch.float32, device=device)
    rows = range(len(confidences)) if idx_mapping is None else idx_mapping
    admitted = impl(
        confidences,
        torch.tensor(list(rows), dtype=torch.int32, device=device),
        torch.as_tensor(num_drafts, dtype=torch.int32, device=device),
        budget,
    )
    assert admitted.dtype == torch.int32
    return admitted.tolist()


@all_forms
def test_the_likeliest_drafts_are_admitted(impl, device):
    # Survivals: 0.8, 0.4, 0.04 and 0.9, 0.72, 0.072.
    confidences = [[0.8, 0.5, 0.1], [0.9, 0.8, 0.1]]
    admitted = [_admit(impl, confidences, [3, 3], n, device) for n in range(7)]
    assert admitted == [[0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [2, 3], [3, 3]]


@all_forms
@pytest.mark.parametrize(
    ("budget", "expected"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (5, [2, 2, 1])],
)
def test_ties_go_to_the_lower_position_then_to_the_lower_request(
    impl, budget, expected, device
):
    assert _admit(impl, [[1.0, 1.0]] * 3, [2, 2, 2], budget, device) == expected


@all_forms
def test_what_a_request_has_no_draft_for_is_not_admitted(impl, device):
    confidences = [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [1.0, 1.0, 1.0]]
    assert _admit(impl, confidences, [1, 3, 0], 3, device) == [1, 2, 0]
    # Nor if it is worth nothing, where others have nothing at all.
    assert _admit(impl, [[1.0] * 3, [0.0] * 3], [0, 3], 2, device) == [0, 2]


@all_forms
def test_confidences_are_read_from_the_requests_rows(impl, device):
    confidences = [[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]]
    assert _admit(impl, confidences, [2, 2], 2, device, [2, 0]) == [2, 0]


@all_forms
def test_nan_is_no_confidence_and_none_is_above_one(impl, device):
    confidences = [[NAN, 1.0], [0.5, 1.0], [7.0, 0.4], [float("inf"), -3.0]]
    # Survivals: 0, 0 and 0.5, 0.5 and 1, 0.4 and 1, 0.
    admitted = [_admit(impl, confidences, [2] * 4, n, device) for n in range(1, 8)]
    assert admitted[:4] == [[0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 1], [0, 2, 1, 1]]
    assert admitted[4:] == [[0, 2, 2, 1], [1, 2, 2, 1], [2, 2, 2, 1]]


def _rank(confidences, num_drafts, budget):
    """Rank pair by pair, by products in float64 that are rounded to float32."""
    pairs = []
    for request, count in enumerate(num_drafts):
        survival = 1.0
        for position in range(count):
            survival *= float(np.float32(confidences[request][position]))
            pairs.append((-np.float32(survival), position, request))
    admitted = [request for _, _, request in sorted(pairs)[:budget]]
    return [admitted.count(request) for request in range(len(num_drafts))]


@all_forms
@pytest.mark.parametrize("seed", range(2))
def test_the_ranking_is_the_one_of_all_pairs_at_every_budget(impl, seed, device):
    generator = np.random.default_rng(seed)
    # Coarse, so that there are ties within requests and between them.
    confidences = generator.integers(0, 5, (6, 5)) / 4
    num_drafts = generator.integers(0, 6, 6).tolist()
    for budget in range(sum(num_drafts) + 1):
        expected = _rank(confidences, num_drafts, budget)
        assert _admit(impl, confidences, num_drafts, budget, device) == expected


# Pairs: less than a block of the kernel, one, and more than two.
@pytest.mark.parametrize("shape", [(1, 1), (4, 64), (9, 29), (9, 60)])
def test_kernel_matches_reference(shape, device):
    generator = np.random.default_rng(0)
    confidences = generator.random(shape, dtype=np.float32)
    confidences[generator.random(shape) < 0.1] = np.nan
    num_drafts = generator.integers(0, shape[1] + 1, shape[0])
    num_drafts[0] = shape[1]
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(num_drafts.sum() * share)
        args = (confidences, num_drafts, budget, device)
        expected = _admit(_admit_drafts_torch, *args)
        assert _admit(_admit_drafts_triton, *args) == expected
        assert _admit(admit_drafts, *args) == expected


@pytest.mark.parametrize("impl", [_admit_drafts_torch, admit_drafts])
def test_long_products_stay_in_order_through_every_rounding(impl, device):
    # Nearly one: neighbours differ by less than float32 can say.
    generator = np.random.default_rng(1)
    confidences = 1 - generator.random((4, 64), dtype=np.float32) * 1e-7
    for budget in (1, 17, 100, 200):
        admitted = _admit(impl, confidences, [64] * 4, budget, device)
        assert admitted == _rank(confidences, [64] * 4, budget)
