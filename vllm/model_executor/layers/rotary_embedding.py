"""Rotary position embedding: rotation of query and key heads by absolute position.

Source: Su et al., "RoFormer", arXiv:2104.09864; the scalings as Hugging Face defines
them, YaRN after Peng et al., arXiv:2309.00071.
"""

import math
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.layer import Layer
from vllm.transformers_utils.config import HfConfig


class RotaryEmbedding(Layer):
    """Rotates the two halves of each head.

    Args:
        config: head size, base and scaling.
        num_positions: absolute positions 0 .. num_positions - 1 can be rotated by.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, config: HfConfig, num_positions: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        cache = build_cos_sin_cache(config, num_positions)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> None:
        """Rotate in place.

        Args:
            positions: [T] int64.
            q: [T, num_heads * head_dim], rows possibly strided.
            k: [T, num_kv_heads * head_dim], as q.
        """
        ops.rotary_embedding(positions, q, k, self.cos_sin_cache, self.head_dim)

    def rotate_keys(self, positions: torch.Tensor, k: torch.Tensor) -> None:
        """Rotate keys that have no queries, in place.

        Args:
            positions: [T] int64.
            k: [T, num_kv_heads * head_dim], rows possibly strided.
        """
        # The operator wants both; one head of zeros stays zeros.
        no_queries = k.new_zeros(k.shape[0], self.head_dim)
        self(positions, no_queries, k)


def build_cos_sin_cache(config: HfConfig, num_positions: int) -> torch.Tensor:
    """Return [num_positions, head_dim] float32: cosines of each angle, then sines.

    Angles are products in float32, as in the reference implementation: in float64 they
    would be more exact, and the text would differ from what others give.
    """
    # On the CPU, whatever torch's default device is: a device's own cosine may differ.
    with torch.device("cpu"):
        inv_freq, amplitude = compute_inv_freq(config)
        angles = torch.outer(torch.arange(num_positions).float(), inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def compute_inv_freq(config: HfConfig) -> tuple[torch.Tensor, float]:
    """Return [head_dim / 2] float32, radians a position, and cos and sin's factor."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq, 1.0
    if scaling["rope_type"] == "linear":
        return inv_freq / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _scale_llama3(inv_freq, scaling), 1.0
    assert scaling["rope_type"] == "yarn", "checked when the configuration was read"
    return _scale_yarn(inv_freq, scaling, config), _yarn_amplitude(scaling)


def _scale_llama3(inv_freq: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Slow down low frequencies, keep high ones, and blend in between."""
    if "freq_factors" in scaling:
        return inv_freq / torch.tensor(scaling["freq_factors"])
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_len = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    # 0 where the wave is longer than original_len / low, 1 where shorter than / high.
    keep = ((original_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _scale_yarn(
    inv_freq: torch.Tensor, scaling: dict[str, Any], config: HfConfig
) -> torch.Tensor:
    """Interpolate the dimensions that turn seldom, keep those that turn often."""
    dim = config.head_dim
    original_len = (
        scaling.get("original_max_position_embeddings")
        or config.max_position_embeddings
    )

    def dimension_of(num_turns: float) -> float:
        wavelength = original_len / num_turns
        return (
            dim
            * math.log(wavelength / (2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolate = ((torch.arange(dim // 2).float() - low) / width).clamp(0, 1)
    slowed = inv_freq / scaling["factor"]
    return slowed * interpolate + inv_freq * (1 - interpolate)


def _yarn_amplitude(scaling: dict[str, Any]) -> float:
    """Return the factor that keeps attention's entropy over a longer context."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
