import pytest
import torch

from tests.markers import needs_cpu_ops
from vllm import _custom_ops as ops
from vllm.utils.seeds import _mix64
from vllm.v1.worker.gpu.sample.random import (
    Purpose,
    _block_noise_keys_torch,
    _noise_keys_torch,
    _noise_keys_triton,
    _philox_uniform_torch,
    _philox_uniform_triton,
    block_noise_keys,
    draft_noise_keys,
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
    for impl in (_noise_keys_torch, noise_keys):
        keys = impl(_int64(SEEDS, device), _int64(POSITIONS, device), purpose)
        assert keys.tolist() == expected


@pytest.mark.parametrize("num_keys", [1, 127, 128, 257])
def test_key_kernel_equals_its_twin(num_keys, device):
    generator = torch.Generator().manual_seed(0)
    bounds = (-(2**63), 2**63 - 1, (num_keys,))
    seeds = torch.randint(*bounds, generator=generator).to(device)
    positions = torch.arange(num_keys, device=device)
    for anchor_positions in (None, positions // 2):
        expected = _noise_keys_torch(seeds, positions, Purpose.ACCEPT, anchor_positions)
        for impl in (_noise_keys_triton, noise_keys):
            actual = impl(seeds, positions, Purpose.ACCEPT, anchor_positions)
            assert torch.equal(actual, expected)


def test_no_seed_position_or_purpose_shares_a_key(device):
    seeds = torch.arange(20, device=device).repeat_interleave(50)
    positions = torch.arange(50, device=device).repeat(20)
    keys = torch.cat([noise_keys(seeds, positions, purpose) for purpose in Purpose])
    assert len(keys.unique()) == 20 * 50 * len(Purpose)


@pytest.mark.parametrize("impl", [_noise_keys_torch, _noise_keys_triton, noise_keys])
def test_the_distance_to_the_anchor_lies_above_the_position(impl, device):
    mask, golden_gamma = 2**64 - 1, 0x9E3779B97F4A7C15
    stream = 1000 * 4 + Purpose.DRAFT + 1 + (3 << 40)
    key = _mix64(_mix64((7 + golden_gamma) & mask) + stream * golden_gamma)
    numbers = (_int64([value], device) for value in (7, 1000, 997))
    seeds, positions, anchor_positions = numbers
    actual = impl(seeds, positions, Purpose.DRAFT, anchor_positions).item()
    assert actual % 2**64 == key


def test_a_position_that_is_drafted_again_draws_afresh(device):
    anchors = torch.arange(40, device=device).repeat_interleave(7)
    positions = anchors + 1 + torch.arange(7, device=device).repeat(40)
    seeds = torch.full_like(positions, 5)
    drafting = noise_keys(seeds, positions, Purpose.DRAFT, anchors)
    others = [noise_keys(seeds, positions, purpose).unique() for purpose in Purpose]
    keys = torch.cat([drafting, *others])
    assert len(keys.unique()) == len(keys)


def test_a_coupled_draft_has_the_noise_of_the_targets_own_draw(device):
    seeds, positions = _int64([5, 5], device), _int64([9, 9], device)
    anchors = _int64([7, 7], device)
    use_coupled = torch.tensor([True, False], device=device)
    keys = draft_noise_keys(seeds, positions, anchors, use_coupled)
    target = noise_keys(seeds, positions, Purpose.TARGET)
    drafted = noise_keys(seeds, positions, Purpose.DRAFT, anchors)
    assert keys.tolist() == [target[0].item(), drafted[1].item()]


@pytest.mark.parametrize("impl", [_block_noise_keys_torch, block_noise_keys])
def test_keys_of_a_block_are_those_of_its_drafts(impl, device):
    seeds, anchors = _int64([5, -6, 7, 8], device), _int64([9, 2**31, 0], device)
    is_seeded = torch.tensor([True, False, False, True], device=device)
    rows = torch.tensor([3, 1, 2], dtype=torch.int32, device=device)
    keys = impl(seeds, is_seeded, rows, anchors, 3)
    for step in range(3):
        positions, of_rows = anchors + step + 1, rows.long()
        expected = draft_noise_keys(
            seeds[of_rows], positions, anchors, is_seeded[of_rows]
        )
        assert torch.equal(keys[step], expected)


@needs_cpu_ops
def test_keys_of_nobody_are_refused():
    numbers = _int64([5], torch.device("cpu"))
    row = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(IndexError, match="request row"):
        block_noise_keys(numbers, torch.tensor([True]), row, numbers, 3)


@pytest.mark.parametrize("num", [1, 1023, 1024, 2049])
def test_uniform_twin_equals_the_kernel_bit_for_bit(num, device):
    keys = _int64(KEYS, device)
    expected = _philox_uniform_triton(keys, num)
    assert torch.equal(_philox_uniform_torch(keys, num), expected)


@needs_cpu_ops
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
