import pytest
import torch

from vllm.v1.worker.gpu.sample.temperature import (
    _apply_temperature_torch,
    _apply_temperature_triton,
    apply_temperature,
)

all_forms = pytest.mark.parametrize(
    "impl",
    [_apply_temperature_torch, _apply_temperature_triton, apply_temperature],
    ids=["torch", "triton", "picked"],
)


@all_forms
def test_divides_each_row_by_its_requests_temperature(impl, device):
    logits = torch.tensor([[1.0, -2.0]], device=device).repeat(4, 1)
    temperature = torch.tensor([0.5, 0.0, 1.0, 4.0], device=device)
    rows = torch.tensor([3, 1, 2, 0], dtype=torch.int32, device=device)
    impl(logits, rows, temperature)
    expected = [[0.25, -0.5], [1.0, -2.0], [1.0, -2.0], [2.0, -4.0]]
    assert logits.tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 2049])
def test_kernel_matches_reference(vocab_size, device):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size, device=device)
    logits[0, 0] = float("-inf")
    rows = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    temperature = torch.tensor([0.0, 0.7], device=device)
    expected = logits.clone()
    _apply_temperature_torch(expected, rows, temperature)
    for impl in (_apply_temperature_triton, apply_temperature):
        actual = logits.clone()
        impl(actual, rows, temperature)
        assert torch.equal(actual, expected)
