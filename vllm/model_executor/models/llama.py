"""Llama, and what is built like it, such as SmolLM2."""

from vllm.model_executor.layers.dense_decoder import DenseCausalLM


class LlamaForCausalLM(DenseCausalLM):
    """The dense decoder as it is; biases come from the configuration."""
