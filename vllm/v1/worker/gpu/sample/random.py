"""Which random number a token draws: a function of seed, position and purpose only.

Neither the batch, nor the chunking, nor the number of drafts is part of the rule.
"""

from enum import IntEnum

import torch

from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton

# splitmix64's constants, as the signed integers that torch and Triton calculate with.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_NUM_PURPOSES = 4
# Positions lie far below 2**40 / _NUM_PURPOSES: the distances have the bits above.
_DISTANCE_SHIFT = 40

_WORD = 0xFFFFFFFF
# Just under 2**-31: an integer below 2**31 never rounds up to 1.
_UNIFORM_SCALE = 4.6566127342e-10


class Purpose(IntEnum):
    """What a draw is for; two purposes never share a number."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def noise_keys(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    anchor_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the Philox key of each draw: the only place that knows the rule.

    Args:
        seeds: [n] int64, of the requests.
        positions: [n] int64, absolute position of the token that is being sampled.
        purpose: of the draws.
        anchor_positions: [n] int64, below `positions`: where the last known token
            stands when a draft is drawn. A position that is drafted again in a later
            round draws afresh by it. None: the draw does not belong to a round.

    Returns:
        [n] int64. For one seed, different (position, purpose, distance to the anchor)
        give different keys.

    Source: splitmix64, as in `vllm/utils/seeds.py`. Twin: _noise_keys_torch.
    """
    impl = _noise_keys_torch
    if seeds.is_cuda:
        impl = _noise_keys_triton
    elif (native := ops.maybe_step_ops()) is not None:
        impl = native.noise_keys
    return impl(seeds, positions, purpose, anchor_positions)


def draft_noise_keys(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    anchor_positions: torch.Tensor,
    use_coupled: torch.Tensor,
) -> torch.Tensor:
    """Return the keys that drafts are drawn with.

    A draft of a coupled request has the noise of the target's own draw at its position,
    so that the two agree as often as they can. Any other draft shares no noise with
    what judges it, nor with an earlier round.

    Args:
        seeds: [n] int64, of the requests.
        positions: [n] int64, absolute position of the draft.
        anchor_positions: [n] int64, of the last known token.
        use_coupled: [n] bool.
    """
    return torch.where(
        use_coupled,
        noise_keys(seeds, positions, Purpose.TARGET),
        noise_keys(seeds, positions, Purpose.DRAFT, anchor_positions),
    )


def block_noise_keys(
    seeds: torch.Tensor,
    is_seeded: torch.Tensor,
    idx_mapping: torch.Tensor,
    anchors: torch.Tensor,
    num_steps: int,
) -> torch.Tensor:
    """Return `draft_noise_keys` of the tokens behind each anchor.

    Args:
        seeds: [max_num_reqs] int64.
        is_seeded: [max_num_reqs] bool: the request is coupled.
        idx_mapping: [R] int32, row -> request row.
        anchors: [R] int64, positions of the last known tokens.
        num_steps: K.

    Returns:
        [K, R] int64.

    Twin: _block_noise_keys_torch.
    """
    native = ops.maybe_step_ops()
    if native is None or seeds.is_cuda:
        return _block_noise_keys_torch(
            seeds, is_seeded, idx_mapping, anchors, num_steps
        )
    purposes = Purpose.TARGET, Purpose.DRAFT
    return native.block_noise_keys(
        seeds, is_seeded, idx_mapping, anchors, num_steps, *purposes
    )


def philox_uniform(keys: torch.Tensor, num: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1): what `tl.rand(key, offset)` gives.

    Args:
        keys: [n] int64.
        num: numbers of each key, for the offsets 0 .. num - 1.

    Returns:
        [n, num] float32, the same bits on every path.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
    Philox4x32-10. Twin: _philox_uniform_torch.
    """
    if keys.is_cuda:
        return _philox_uniform_triton(keys, num)
    if ops.has_cpu_ops():
        return ops.philox_uniform(keys, num)
    return _philox_uniform_torch(keys, num)


def _block_noise_keys_torch(
    seeds: torch.Tensor,
    is_seeded: torch.Tensor,
    idx_mapping: torch.Tensor,
    anchors: torch.Tensor,
    num_steps: int,
) -> torch.Tensor:
    steps = torch.arange(1, num_steps + 1, device=anchors.device)
    keys = draft_noise_keys(
        seeds[idx_mapping].repeat(num_steps),
        (anchors + steps.unsqueeze(1)).flatten(),
        anchors.repeat(num_steps),
        is_seeded[idx_mapping].repeat(num_steps),
    )
    return keys.view(num_steps, -1)


def _noise_keys_torch(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    anchor_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    stream = positions * _NUM_PURPOSES + (int(purpose) + 1)
    if anchor_positions is not None:
        stream = stream + ((positions - anchor_positions) << _DISTANCE_SHIFT)
    return _mix64(_mix64(seeds + _GOLDEN_GAMMA) + stream * _GOLDEN_GAMMA)


def _mix64(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, num_bits: int) -> torch.Tensor:
    # The shift of a signed integer fills with its sign: mask that away.
    return (value >> num_bits) & (2 ** (64 - num_bits) - 1)


def _philox_uniform_torch(keys: torch.Tensor, num: int) -> torch.Tensor:
    offsets = torch.arange(num, dtype=torch.int64, device=keys.device)
    return philox_uniform_at(keys.unsqueeze(-1), offsets)


def philox_uniform_at(keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `tl.rand(key, offset)` for any pairs; for the torch twins.

    Args:
        keys: int64, of a shape that broadcasts with that of offsets.
        offsets: int64 in [0, 2**31).

    Returns:
        float32, of the broadcast shape.
    """
    key_0, key_1, counter_0 = torch.broadcast_tensors(
        keys & _WORD, (keys >> 32) & _WORD, offsets
    )
    counter_1 = counter_2 = counter_3 = torch.zeros_like(counter_0)
    for _ in range(10):
        product_0 = counter_0 * 0xD2511F53
        product_2 = counter_2 * 0xCD9E8D57
        counter_0 = ((product_2 >> 32) & _WORD) ^ counter_1 ^ key_0
        counter_2 = ((product_0 >> 32) & _WORD) ^ counter_3 ^ key_1
        counter_1 = product_2 & _WORD
        counter_3 = product_0 & _WORD
        key_0 = (key_0 + 0x9E3779B9) & _WORD
        key_1 = (key_1 + 0xBB67AE85) & _WORD
    signed = torch.where(counter_0 >= 2**31, counter_0 - 2**32, counter_0)
    magnitude = torch.where(signed < 0, -signed - 1, signed)
    scale = torch.tensor(_UNIFORM_SCALE, dtype=torch.float32, device=keys.device)
    return magnitude.to(torch.float32) * scale


def _noise_keys_triton(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    anchor_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    # Without an anchor the token is its own: a distance of 0.
    anchor_positions = positions if anchor_positions is None else anchor_positions
    keys = torch.empty_like(seeds)
    num_keys = seeds.shape[0]
    block_size = 128
    _noise_keys_kernel[(triton.cdiv(num_keys, block_size),)](
        seeds,
        positions,
        anchor_positions,
        keys,
        num_keys,
        int(purpose),
        BLOCK_SIZE=block_size,
    )
    return keys


def _philox_uniform_triton(keys: torch.Tensor, num: int) -> torch.Tensor:
    uniform = torch.empty((keys.shape[0], num), dtype=torch.float32, device=keys.device)
    block_size = 1024
    _philox_uniform_kernel[(keys.shape[0], triton.cdiv(num, block_size))](
        keys, uniform, num, BLOCK_SIZE=block_size
    )
    return uniform


@triton.jit
def _mix64_device(value):
    # int64 in and out; the shifts are logical.
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise_key(seed, position, anchor_position, PURPOSE):
    # The device's form of _noise_keys_torch: blocks of int64 in and out.
    stream = position * 4 + (PURPOSE + 1) + ((position - anchor_position) << 40)
    seed = _mix64_device(seed - 0x61C8864680B583EB)
    return _mix64_device(seed + stream * -0x61C8864680B583EB)


@triton.jit
def _noise_keys_kernel(
    seeds_ptr,  # [num_keys]
    positions_ptr,  # [num_keys]
    anchor_positions_ptr,  # [num_keys]
    keys_ptr,  # [num_keys]
    num_keys,
    PURPOSE,
    BLOCK_SIZE: tl.constexpr,
):
    key_idx = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = key_idx < num_keys
    seed = tl.load(seeds_ptr + key_idx, mask=mask, other=0)
    position = tl.load(positions_ptr + key_idx, mask=mask, other=0)
    anchor_position = tl.load(anchor_positions_ptr + key_idx, mask=mask, other=0)
    key = _noise_key(seed, position, anchor_position, PURPOSE)
    tl.store(keys_ptr + key_idx, key, mask=mask)


@triton.jit
def _philox_uniform_kernel(
    keys_ptr,  # [num_keys]
    uniform_ptr,  # [num_keys, num]
    num,
    BLOCK_SIZE: tl.constexpr,
):
    key_idx = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    uniform = tl.rand(tl.load(keys_ptr + key_idx), offsets)
    tl.store(uniform_ptr + key_idx * num + offsets, uniform, mask=offsets < num)
