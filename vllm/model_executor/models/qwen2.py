"""Qwen2 and Qwen2.5, dense."""

from vllm.model_executor.layers.dense_decoder import DenseCausalLM


class Qwen2ForCausalLM(DenseCausalLM):
    """The dense decoder; its q, k and v projections always have a bias."""
