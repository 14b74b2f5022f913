import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.residual import (
    _write_residual_logits_torch,
    _write_residual_logits_triton,
    write_residual_logits,
)


def _picked(target, draft, is_rejected, mapping, local_pos):
    drafts = torch.zeros(len(target), dtype=torch.int64, device=target.device)
    write_residual_logits(target, draft, drafts, is_rejected, mapping, local_pos)


all_forms = pytest.mark.parametrize(
    "impl",
    [_write_residual_logits_torch, _write_residual_logits_triton, _picked],
    ids=["torch", "triton", "picked"],
)


def _zeros(num: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int32, device=device)


@all_forms
def test_the_residual_is_what_the_target_has_above_the_draft(impl, device):
    target = torch.tensor([[0.5, 0.3, 0.1, 0.1]], device=device).log()
    draft = torch.tensor([[[0.2, 0.2, 0.5, 0.1]]], device=device).log()
    is_rejected = torch.tensor([True], device=device)
    impl(target, draft, is_rejected, _zeros(1, device), _zeros(1, device))
    # 0.3 and 0.1 are left.
    expected = torch.tensor([[0.75, 0.25, 0.0, 0.0]], device=device)
    torch.testing.assert_close(target.softmax(dim=-1), expected, rtol=0, atol=1e-6)


@all_forms
def test_rows_that_are_not_rejected_stay(impl, device):
    target = torch.randn(2, 5, device=device)
    before = target.clone()
    is_rejected = torch.tensor([False, True], device=device)
    draft = torch.randn(1, 1, 5, device=device)
    impl(target, draft, is_rejected, _zeros(2, device), _zeros(2, device))
    assert torch.equal(target[0], before[0])
    assert not torch.equal(target[1], before[1])


@all_forms
def test_an_empty_residual_leaves_the_target(impl, device):
    target = torch.tensor([[1.0, 2.0, float("-inf")]], device=device)
    before = target.clone()
    is_rejected = torch.tensor([True], device=device)
    impl(target, before.unsqueeze(0), is_rejected, _zeros(1, device), _zeros(1, device))
    assert torch.equal(target, before)


@all_forms
def test_a_row_with_nan_keeps_its_numbers(impl, device):
    target = torch.tensor([[1.0, float("nan"), 3.0]], device=device)
    is_rejected = torch.tensor([True], device=device)
    draft = torch.zeros(1, 1, 3, device=device)
    impl(target, draft, is_rejected, _zeros(1, device), _zeros(1, device))
    assert target[0, [0, 2]].tolist() == [1.0, 3.0]


def test_a_certain_draft_leaves_the_others(device):
    target = torch.tensor([[1.0, 2.0, 3.0]] * 3, device=device)
    drafts = torch.tensor([1, 1, -1], device=device)
    is_rejected = torch.tensor([True, False, False], device=device)
    rows = _zeros(3, device), _zeros(3, device)
    write_residual_logits(target, None, drafts, is_rejected, *rows)
    kept = [1.0, 2.0, 3.0]
    assert target.tolist() == [[1.0, float("-inf"), 3.0], kept, kept]


@pytest.mark.parametrize("vocab_size", [1, 2047, 2048, 4097])
def test_kernel_matches_reference(vocab_size, device):
    torch.manual_seed(0)
    target = torch.randn(5, vocab_size, device=device) * 2
    target[:, : vocab_size // 3] = float("-inf")
    draft = torch.randn(3, 2, vocab_size, device=device) * 2
    is_rejected = torch.tensor([True, False, True, True, False], device=device)
    mapping = torch.tensor([2, 2, 0, 0, 1], dtype=torch.int32, device=device)
    local_pos = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int32, device=device)
    expected = target.clone()
    _write_residual_logits_torch(expected, draft, is_rejected, mapping, local_pos)
    for impl in (_write_residual_logits_triton, _picked):
        actual = target.clone()
        impl(actual, draft, is_rejected, mapping, local_pos)
        # Differences of probabilities cancel: compare what they are, not their
        # logarithms.
        torch.testing.assert_close(actual.exp(), expected.exp(), rtol=1e-5, atol=1e-7)
