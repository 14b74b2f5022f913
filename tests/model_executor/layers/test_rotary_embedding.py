import math
from dataclasses import replace

import pytest
import torch

from vllm.model_executor.layers.rotary_embedding import (
    RotaryEmbedding,
    build_cos_sin_cache,
    compute_inv_freq,
)
from vllm.transformers_utils.config import HfConfig

CONFIG = HfConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
)


def scaled(**scaling: object) -> HfConfig:
    return replace(CONFIG, rope_scaling=scaling)


def test_frequencies_fall_by_the_base():
    inv_freq, amplitude = compute_inv_freq(CONFIG)
    assert inv_freq.tolist() == pytest.approx([1.0, 0.1])
    assert amplitude == 1.0


def test_linear_scaling_divides_every_frequency():
    inv_freq, _ = compute_inv_freq(scaled(rope_type="linear", factor=4.0))
    assert inv_freq.tolist() == pytest.approx([0.25, 0.025])


def test_llama3_scaling_keeps_fast_and_slows_slow_frequencies():
    # Wavelengths 6.28 and 62.8: 100 / 6.28 > 4 turns is kept, 100 / 62.8 is blended.
    inv_freq, _ = compute_inv_freq(
        scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=100,
        )
    )
    keep = (100 * 0.1 / (2 * math.pi) - 1) / 3
    expected = keep * 0.1 + (1 - keep) * 0.1 / 8
    assert inv_freq.tolist() == pytest.approx([1.0, expected])


def test_frequency_factors_divide():
    config = scaled(rope_type="llama3", freq_factors=[1.0, 5.0])
    assert compute_inv_freq(config)[0].tolist() == pytest.approx([1.0, 0.02])


def test_yarn_amplitude_grows_with_the_factor():
    config = scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert compute_inv_freq(config)[1] == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_amplitude_can_be_given():
    config = scaled(rope_type="yarn", factor=4.0, attention_factor=0.5)
    assert compute_inv_freq(config)[1] == 0.5


def test_cache_holds_cosines_then_sines():
    cache = build_cos_sin_cache(CONFIG, 3)
    angles = [2.0, 0.2]
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    assert cache.shape == (3, 4)
    assert cache[2].tolist() == pytest.approx(expected, abs=1e-7)


def test_halves_of_each_head_are_rotated_in_place():
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 0.0, 0.0]])
    k = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    RotaryEmbedding(CONFIG, 4)(torch.tensor([3]), q, k)
    c0, s0, c1, s1 = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    expected_q = [c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + s0, 4 * c1 + 2 * s1]
    assert q[0, :4].tolist() == pytest.approx(expected_q, abs=1e-6)
    assert q[0, 4:].tolist() == pytest.approx([0, c1, 0, s1], abs=1e-6)
    assert k[0].tolist() == pytest.approx([-s0, 0, c0, 0], abs=1e-6)


def test_keys_alone_are_rotated_as_with_queries():
    rotary = RotaryEmbedding(CONFIG, 8)
    positions = torch.tensor([0, 3, 7])
    # Columns of a wider tensor, as one product of several layers gives them.
    wide = torch.randn(3, 16)
    k, q = wide[:, :8].clone(), torch.randn(3, 8)
    rotary(positions, q, k)
    rotary.rotate_keys(positions, wide[:, :8])
    assert torch.equal(wide[:, :8], k)
