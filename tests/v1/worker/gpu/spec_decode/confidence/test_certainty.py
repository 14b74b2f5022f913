import math

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.confidence import certainty

both = pytest.mark.parametrize(
    "impl",
    [certainty._compute_certainty_torch, certainty._compute_certainty_triton],
    ids=["torch", "triton"],
)
NONE, NAN = float("-inf"), float("nan")


def compute(impl, logits, device, temperature=0.0):
    rows = torch.tensor(logits, device=device)
    index = torch.zeros(len(logits), dtype=torch.int32, device=device)
    temperatures = torch.tensor([temperature], device=device)
    return impl(rows, index, temperatures).tolist()


@both
def test_of_two_tokens_it_is_the_distance_of_their_logits(impl, device):
    rows = [[1.0, 3.0, NONE], [NONE, 4.5, 4.0], [2.0, NONE, 2.0]]
    assert compute(impl, rows, device) == pytest.approx([2.0, 0.5, 0.0], abs=1e-6)


@both
def test_of_equal_tokens_it_says_how_many_there_are(impl, device):
    rows = [[7.0] * 9, [7.0] * 3000]
    expected = [math.log(1 / 8), math.log(1 / 2999)]
    for row, value in zip(rows, expected, strict=True):
        assert compute(impl, [row], device) == pytest.approx([value], abs=1e-5)


@both
@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.0, 2.0), (1.0, 2.0), (0.5, 4.0), (4.0, 0.5)]
)
def test_it_is_that_of_the_temperature(impl, device, temperature, expected):
    values = compute(impl, [[1.0, 3.0, NONE]], device, temperature)
    assert values == pytest.approx([expected], abs=1e-5)


@both
def test_an_only_choice_is_as_certain_as_can_be(impl, device):
    [value] = compute(impl, [[NONE, 3.0, NONE]], device)
    assert 13.0 < value < 14.0


@both
def test_a_broken_row_says_nothing(impl, device):
    rows = [[NONE, NONE, NONE], [NAN, NAN, NAN], [3.0, NAN, 1.0], [NAN, 2.0, 1.0]]
    assert all(map(math.isnan, compute(impl, rows, device)))


@pytest.mark.parametrize("vocab_size", [2, 2047, 2048, 4097])
def test_the_kernel_matches_its_twin(vocab_size, device):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 4
    logits[3] = NONE
    arguments = (
        logits.to(device),
        torch.tensor([2, 0, 1, 1, 0], dtype=torch.int32, device=device),
        torch.tensor([0.0, 0.7, 1.0], device=device),
    )
    # Sums in another order; certain tokens magnify what they differ by.
    torch.testing.assert_close(
        certainty._compute_certainty_triton(*arguments),
        certainty._compute_certainty_torch(*arguments),
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )
