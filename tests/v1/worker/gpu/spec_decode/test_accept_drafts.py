import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.accept_drafts import (
    _accept_drafts_torch,
    _accept_drafts_triton,
    accept_drafts,
)

all_forms = pytest.mark.parametrize(
    "impl",
    [_accept_drafts_torch, _accept_drafts_triton, accept_drafts],
    ids=["torch", "triton", "picked"],
)
NEG_INF = float("-inf")


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@all_forms
def test_a_drawn_draft_passes_below_target_over_draft(impl, device):
    # Token 1 has 0.25 of the target and 0.5 of the draft: it passes below one half.
    target = torch.tensor([[0.5, 0.25, 0.25]], device=device).log().repeat(5, 1)
    draft = torch.tensor([[[0.25, 0.5, 0.25]]], device=device).log()
    drafts = torch.tensor([1, 1, 1, 0, 2], device=device)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.999, 0.999], device=device)
    zeros = _int32([0] * 5, device)
    is_accepted = impl(target, draft, drafts, uniform, zeros, zeros)
    assert is_accepted.tolist() == [True, True, False, True, True]


@all_forms
def test_a_certain_draft_passes_below_the_targets_probability(impl, device):
    target = torch.tensor([[0.7, 0.3]], device=device).log().repeat(4, 1)
    drafts = torch.tensor([0, 0, 1, 1], device=device)
    uniform = torch.tensor([0.69, 0.71, 0.29, 0.31], device=device)
    zeros = _int32([0] * 4, device)
    is_accepted = impl(target, None, drafts, uniform, zeros, zeros)
    assert is_accepted.tolist() == [True, False, True, False]


@all_forms
def test_what_the_target_forbids_never_passes_and_its_only_choice_always(impl, device):
    target = torch.tensor([[NEG_INF, 2.0], [NEG_INF, 2.0]], device=device)
    drafts = torch.tensor([0, 1], device=device)
    uniform = torch.tensor([0.0, 1 - 2**-24], device=device)
    zeros = _int32([0, 0], device)
    assert impl(target, None, drafts, uniform, zeros, zeros).tolist() == [False, True]


@all_forms
def test_a_row_without_a_draft_or_a_number_accepts_nothing(impl, device):
    nan = float("nan")
    target = torch.tensor([[0.0, 0.0], [nan, 0.0], [NEG_INF, NEG_INF]], device=device)
    drafts = torch.tensor([-1, 1, 1], device=device)
    zeros = _int32([0] * 3, device)
    is_accepted = impl(
        target, None, drafts, torch.zeros(3, device=device), zeros, zeros
    )
    assert is_accepted.tolist() == [False, False, False]


@all_forms
def test_the_draft_distribution_is_that_of_the_request_and_place(impl, device):
    # Request row 2, place 1 alone makes token 0 unlikely enough to pass.
    target = torch.tensor([[0.5, 0.5]], device=device).log()
    draft = torch.full((3, 2, 2), 0.0, device=device)
    draft[:, :, 0] = 10.0
    draft[2, 1] = torch.tensor([-10.0, 0.0], device=device)
    drafts, uniform = torch.zeros(1, dtype=torch.int64), torch.tensor([0.9])
    rows = [drafts.to(device), uniform.to(device)]
    at = _int32([2], device), _int32([1], device)
    assert impl(target, draft, *rows, *at).tolist() == [True]
    beside = _int32([1], device), _int32([1], device)
    assert impl(target, draft, *rows, *beside).tolist() == [False]


@pytest.mark.parametrize("vocab_size", [1, 2047, 2048, 4097])
@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_kernel_matches_reference(vocab_size, has_draft_logits, device):
    torch.manual_seed(0)
    num_logits = 6
    target = torch.randn(num_logits, vocab_size, device=device) * 2
    draft = torch.randn(3, 2, vocab_size, device=device) * 2
    drafts = target.argmax(dim=-1)
    drafts[0] = -1
    uniform = torch.rand(num_logits, device=device)
    mapping = _int32([2, 2, 2, 0, 0, 0], device)
    local_pos = _int32([0, 1, 0, 0, 1, 1], device)
    args = target, draft if has_draft_logits else None, drafts, uniform
    expected = _accept_drafts_torch(*args, mapping, local_pos)
    for impl in (_accept_drafts_triton, accept_drafts):
        assert torch.equal(impl(*args, mapping, local_pos), expected)
