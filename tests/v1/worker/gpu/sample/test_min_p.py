import pytest
import torch

from vllm.v1.worker.gpu.sample.min_p import (
    _apply_min_p_torch,
    _apply_min_p_triton,
    apply_min_p,
)

both = pytest.mark.parametrize(
    "impl", [_apply_min_p_torch, _apply_min_p_triton], ids=["torch", "triton"]
)


@both
def test_drops_tokens_below_the_scaled_top_probability(impl, device):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], device=device).log()
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    impl(logits, rows, torch.tensor([0.4], device=device))
    assert torch.isneginf(logits).tolist() == [[False, False, True, True]]


@both
def test_zero_keeps_every_token(impl, device):
    logits = torch.randn(3, 7, device=device)
    before = logits.clone()
    rows = torch.arange(3, dtype=torch.int32, device=device)
    impl(logits, rows, torch.zeros(3, device=device))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 2049])
@pytest.mark.parametrize("num_logits", [1, 5])
def test_kernel_matches_reference(num_logits, vocab_size, device):
    torch.manual_seed(0)
    logits = torch.randn(num_logits, vocab_size, device=device) * 3
    rows = torch.randint(0, 4, (num_logits,), dtype=torch.int32, device=device)
    min_p = torch.tensor([0.0, 0.05, 0.5, 1.0], device=device)
    expected, actual = logits.clone(), logits.clone()
    _apply_min_p_torch(expected, rows, min_p)
    _apply_min_p_triton(actual, rows, min_p)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_rejects_half_precision(device):
    logits = torch.zeros(1, 4, dtype=torch.float16, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="float32"):
        apply_min_p(logits, rows, torch.zeros(1, device=device))


@both
def test_only_rows_that_ask_are_filtered(impl, device):
    logits = torch.tensor([[0.5, 0.3, 0.2]], device=device).log().repeat(3, 1)
    rows = torch.tensor([0, 1, 0], dtype=torch.int32, device=device)
    impl(logits, rows, torch.tensor([0.0, 0.9], device=device))
    kept = torch.isneginf(logits).logical_not().sum(dim=-1).tolist()
    assert kept == [3, 1, 3]
