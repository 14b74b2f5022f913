import pytest
import torch

from vllm import _custom_ops as ops
from vllm.utils.seeds import _mix64
from vllm.v1.worker.gpu.sample.random import (
    Purpose,
    _noise_keys_torch,
    _noise_keys_triton,
    _philox_uniform_torch,
    _philox_uniform_triton,
    noise_keys,
    philox_uniform,
)

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
POSITIONS = [0, 1, 2, 3, 1000, 2**31]
KEYS = [0, 1, -1, 123456789012345, -987654321098765, 2**62, -(2**63)]


def _int64(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_keys_follow_the_rule_in_plain_integers(purpose, device):
    mask, golden_gamma = 2**64 - 1, 0x9E3779B97F4A7C15
    expected = []
    for seed, position in zip(SEEDS, POSITIONS, strict=True):
        stream = position * 4 + purpose + 1
        key = _mix64(_mix64((seed + golden_gamma) & mask) + stream * golden_gamma)
        expected.append(key - 2**64 if key >= 2**63 else key)
    keys = _noise_keys_torch(_int64(SEEDS, device), _int64(POSITIONS, device), purpose)
    assert keys.tolist() == expected


@pytest.mark.parametrize("num_keys", [1, 127, 128, 257])
def test_key_kernel_equals_its_twin(num_keys, device):
    generator = torch.Generator().manual_seed(0)
    bounds = (-(2**63), 2**63 - 1, (num_keys,))
    seeds = torch.randint(*bounds, generator=generator).to(device)
    positions = torch.arange(num_keys, device=device)
    expected = _noise_keys_torch(seeds, positions, Purpose.ACCEPT)
    actual = _noise_keys_triton(seeds, positions, Purpose.ACCEPT)
    assert torch.equal(actual, expected)


def test_no_seed_position_or_purpose_shares_a_key(device):
    seeds = torch.arange(20, device=device).repeat_interleave(50)
    positions = torch.arange(50, device=device).repeat(20)
    keys = torch.cat([noise_keys(seeds, positions, purpose) for purpose in Purpose])
    assert len(keys.unique()) == 20 * 50 * len(Purpose)


@pytest.mark.parametrize("num", [1, 1023, 1024, 2049])
def test_uniform_twin_equals_the_kernel_bit_for_bit(num, device):
    keys = _int64(KEYS, device)
    expected = _philox_uniform_triton(keys, num)
    assert torch.equal(_philox_uniform_torch(keys, num), expected)


@pytest.mark.skipif(not ops.has_cpu_ops(), reason="needs the compiled operators")
@pytest.mark.parametrize("num", [1, 15, 16, 1023, 1024, 2049])
def test_uniform_operator_equals_the_twin_bit_for_bit(num):
    keys = _int64(KEYS, torch.device("cpu"))
    assert torch.equal(ops.philox_uniform(keys, num), _philox_uniform_torch(keys, num))


def test_uniform_numbers_are_those_of_philox(device):
    # Philox4x32-10 with key 0 and counter 0 gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    first = philox_uniform(_int64([0], device), 1).item()
    assert first == pytest.approx(0x6627E8D5 / 2**31, abs=1e-7)


def test_uniform_numbers_are_spread_evenly(device):
    uniform = philox_uniform(torch.arange(200, device=device), 1000)
    assert 0.0 <= uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1.0
    counts = torch.histc(uniform.cpu(), bins=16, min=0.0, max=1.0)
    expected = uniform.numel() / 16
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # Mean 15, variance 30: ten standard deviations.
    assert chi_square < 15 + 10 * 30**0.5
