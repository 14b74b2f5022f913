import pytest
import torch

from vllm.v1.worker.gpu.sample.top_k_top_p import (
    _top_k_top_p_torch,
    _top_k_top_p_triton,
    apply_top_k_top_p,
)

INF = float("inf")


def _public(logits, top_k, top_p):
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    apply_top_k_top_p(logits, rows, top_k, top_p)


every = pytest.mark.parametrize(
    "impl",
    [_top_k_top_p_torch, _top_k_top_p_triton, _public],
    ids=["torch", "triton", "public"],
)


def _kept(impl, logits, top_k, top_p, device) -> list[list[int]]:
    logits = logits.to(device)
    before = logits.clone()
    impl(
        logits,
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
    )
    is_kept = ~torch.isneginf(logits)
    assert torch.equal(logits[is_kept], before[is_kept])
    return [row.nonzero().flatten().tolist() for row in is_kept]


@every
def test_top_k_keeps_everything_that_equals_the_kth(impl, device):
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, -1.0]]).repeat(4, 1)
    kept = _kept(impl, logits, [1, 2, 4, 0], [1.0] * 4, device)
    assert kept == [[0], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@every
def test_top_p_keeps_what_has_less_than_p_before_it(impl, device):
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log().repeat(4, 1)
    kept = _kept(impl, logits, [0] * 4, [0.4, 0.6, 0.8, 0.95], device)
    assert kept == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3]]


@every
def test_top_p_keeps_or_drops_equal_tokens_together(impl, device):
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log().repeat(2, 1)
    kept = _kept(impl, logits, [0, 0], [0.3, 0.5], device)
    assert kept == [[1], [0, 1, 2, 3]]


@every
def test_top_p_looks_at_the_softmax_of_what_top_k_left(impl, device):
    # Of the first two alone the probabilities are 0.6 and 0.4; of all four 0.3 and 0.2.
    logits = torch.tensor([[0.3, 0.2, 0.19, 0.15, 0.16]]).log().repeat(2, 1)
    kept = _kept(impl, logits, [2, 0], [0.55, 0.55], device)
    assert kept == [[0], [0, 1, 2]]


@every
def test_top_p_stops_when_the_sum_equals_p(impl, device):
    # Different logits with one weight, exactly: both have half of the probability.
    logits = torch.tensor([[0.0, -1e-10]]).repeat(2, 1)
    assert _kept(impl, logits, [0, 0], [0.5, 0.75], device) == [[0], [0, 1]]


@every
def test_the_smallest_p_keeps_the_most_likely_token(impl, device):
    logits = torch.tensor([[-3.0, 2.0, -INF, 1.0], [-INF, -INF, -7.0, -INF]])
    assert _kept(impl, logits, [0, 0], [1e-9, 1e-9], device) == [[1], [2]]


@every
def test_k_beyond_the_finite_logits_keeps_them(impl, device):
    logits = torch.tensor([[-3.0, 2.0, -INF, 1.0]])
    assert _kept(impl, logits, [4], [1.0], device) == [[0, 1, 3]]


@every
def test_minus_and_plus_zero_are_equal(impl, device):
    logits = torch.tensor([[0.0, -0.0, -1.0]])
    assert _kept(impl, logits, [1], [1.0], device) == [[0, 1]]


@pytest.mark.parametrize(
    "impl", [_top_k_top_p_triton, _public], ids=["triton", "public"]
)
@pytest.mark.parametrize("vocab_size", [1, 2047, 2048, 4097])
def test_every_path_matches_the_reference(impl, vocab_size, device):
    torch.manual_seed(0)
    logits = torch.randn(7, vocab_size, device=device) * 3
    logits[3] = logits[3].round()
    logits[4, ::2] = -INF
    top_k = torch.tensor([0, 1, 50, 20, 7, 0, vocab_size], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.6, 1.0, 0.37, 0.999])
    expected, actual = logits.clone(), logits.clone()
    _top_k_top_p_torch(expected, top_k.to(device), top_p.to(device))
    impl(actual, top_k.to(device), top_p.to(device))
    assert torch.equal(actual, expected)


def test_rejects_half_precision(device):
    logits = torch.zeros(1, 4, dtype=torch.float16, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="float32"):
        apply_top_k_top_p(logits, rows, rows, rows.float())


@every
def test_a_row_without_a_number_keeps_nothing_and_harms_no_other(impl, device):
    nan, low = float("nan"), -INF
    logits = torch.tensor([[nan] * 3, [low] * 3, [1.0, nan, 2.0]])
    impl(
        logits := logits.to(device),
        torch.tensor([2, 0, 1], dtype=torch.int32, device=device),
        torch.tensor([0.5, 0.5, 1.0], device=device),
    )
    assert logits.isfinite().tolist() == [[False] * 3] * 2 + [[False, False, True]]
