"""Qwen3, dense."""

from vllm.model_executor.layers.dense_decoder import DenseCausalLM


class Qwen3ForCausalLM(DenseCausalLM):
    """The dense decoder with a norm of every query and key head."""

    has_qk_norm = True
