import math

import pytest
import torch

from tests.markers import needs_cpu_ops
from vllm import _custom_ops as ops
from vllm.v1.worker.gpu.sample.gumbel import (
    _gumbel_argmax_torch,
    _gumbel_argmax_triton,
    gumbel_argmax,
    gumbel_sample,
)
from vllm.v1.worker.gpu.sample.random import Purpose, noise_keys, philox_uniform

INF = float("inf")
NAN = float("nan")
IMPLS = [_gumbel_argmax_torch, _gumbel_argmax_triton, gumbel_argmax]
every = pytest.mark.parametrize("impl", IMPLS, ids=["torch", "triton", "public"])


def _keys(num: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num, dtype=torch.int64, device=device) * 7919 - 3


def _greedy(num: int, device: torch.device) -> torch.Tensor:
    return torch.ones(num, dtype=torch.uint8, device=device)


@every
def test_greedy_takes_the_lowest_id_among_equals_and_never_a_nan(impl, device):
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0],
            [NAN, -5.0, NAN, -6.0],
            [-INF, -INF, -1e30, -INF],
            [0.0, INF, INF, 0.0],
        ],
        device=device,
    )
    assert impl(logits, _keys(4, device), _greedy(4, device)).tolist() == [1, 1, 2, 1]


@every
@pytest.mark.parametrize("is_greedy", [0, 1])
def test_a_row_without_a_choice_gives_minus_one(impl, is_greedy, device):
    logits = torch.tensor([[-INF] * 3, [NAN] * 3, [-INF, 0.0, NAN]], device=device)
    flags = torch.full((3,), is_greedy, dtype=torch.uint8, device=device)
    assert impl(logits, _keys(3, device), flags).tolist() == [-1, -1, 1]


@every
def test_the_draw_is_the_argmax_of_logit_plus_noise(impl, device):
    logits = torch.tensor([[0.1, -0.4, 0.9, 0.3, -1.5]], device=device).repeat(40, 1)
    keys = _keys(40, device)
    uniform = philox_uniform(keys, 5).tolist()
    expected = []
    for row in uniform:
        noise = [-math.log(-math.log1p(-max(u, 2.0**-33))) for u in row]
        scores = [a + b for a, b in zip(logits[0].tolist(), noise, strict=True)]
        expected.append(scores.index(max(scores)))
    assert len(set(expected)) > 2
    flags = torch.zeros(40, dtype=torch.uint8, device=device)
    assert impl(logits, keys, flags).tolist() == expected


@pytest.mark.parametrize("impl", IMPLS[1:], ids=["triton", "public"])
@pytest.mark.parametrize("vocab_size", [1, 1023, 1024, 2049])
def test_every_path_draws_the_twins_tokens(impl, vocab_size, device):
    torch.manual_seed(0)
    num_logits = 6
    logits = torch.randn(num_logits, vocab_size, device=device)
    logits[torch.rand_like(logits) < 0.3] = -INF
    logits[1, vocab_size // 2] = NAN
    flags = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.uint8, device=device)
    keys = _keys(num_logits, device)
    expected = _gumbel_argmax_torch(logits, keys, flags)
    assert torch.equal(impl(logits, keys, flags), expected)


@needs_cpu_ops
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_operator_draws_the_twins_tokens_at_full_width(scale):
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    logits = torch.randn(12, 49152) * scale
    flags = torch.zeros(12, dtype=torch.uint8)
    expected = _gumbel_argmax_torch(logits, _keys(12, cpu), flags)
    assert torch.equal(ops.gumbel_argmax(logits, _keys(12, cpu), flags), expected)


def test_draws_follow_the_softmax(device):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    num_draws = 4_000
    logits = probabilities.log().repeat(num_draws, 1).to(device)
    keys = noise_keys(
        torch.full((num_draws,), 42, device=device),
        torch.arange(num_draws, device=device),
        Purpose.TARGET,
    )
    flags = torch.zeros(num_draws, dtype=torch.uint8, device=device)
    sampled = _gumbel_argmax_torch(logits, keys, flags).cpu()
    counts = torch.bincount(sampled, minlength=6).double()
    expected = probabilities.double() * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # Mean 5, variance 10: ten standard deviations.
    assert chi_square < 5 + 10 * 10**0.5


def _sample(logits, rows, states, positions, **kwargs):
    temperature, seeds = states
    return gumbel_sample(logits, rows, temperature, seeds, positions, **kwargs).tolist()


def test_a_row_draws_the_same_token_alone_and_in_a_batch(device):
    torch.manual_seed(0)
    logits = torch.randn(8, 300, device=device)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0], device=device)
    states = temperature, torch.tensor([5, 6, -7, 5], device=device)
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([9, 9, 9, 9, 10, 10, 10, 10], device=device)
    together = _sample(logits, rows, states, positions)
    alone = [
        _sample(logits[i : i + 1], rows[i : i + 1], states, positions[i : i + 1])[0]
        for i in range(8)
    ]
    assert together == alone


def test_seed_position_and_purpose_decide_the_draw_and_the_row_does_not(device):
    logits = torch.zeros(5, 1000, device=device)
    temperature = torch.ones(3, device=device)
    states = temperature, torch.tensor([5, 5, 6], device=device)
    rows = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 3, 3, 4, 3], device=device)
    a, b, other_seed, other_position, c = _sample(logits, rows, states, positions)
    assert a == b == c
    assert a not in (other_seed, other_position)
    drafted = _sample(logits, rows, states, positions, purpose=Purpose.DRAFT)
    assert drafted[0] != a


def test_temperature_zero_is_greedy_with_and_without_the_hosts_word(device):
    torch.manual_seed(0)
    logits = torch.randn(3, 50, device=device)
    rows = torch.zeros(3, dtype=torch.int32, device=device)
    states = torch.zeros(1, device=device), torch.tensor([5], device=device)
    positions = torch.arange(3, device=device)
    expected = logits.argmax(dim=-1).tolist()
    assert _sample(logits, rows, states, positions) == expected
    assert _sample(logits, rows, states, positions, is_all_greedy=True) == expected


def test_rejects_half_precision(device):
    logits = torch.zeros(1, 4, dtype=torch.float16, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    number = torch.zeros(1, device=device)
    seeds = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="float32"):
        gumbel_sample(logits, rows, number, seeds, seeds)
