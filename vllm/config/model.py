"""Which model is served, and the limits that follow from it."""

from dataclasses import dataclass, field
from typing import Any

from vllm.transformers_utils.config import HfConfig

LOGPROBS_MODES = (
    "raw_logprobs",
    "processed_logprobs",
    "raw_logits",
    "processed_logits",
)

QUANTIZATIONS = ("auto", "none", "gguf", "int8")


@dataclass(frozen=True)
class ModelConfig:
    """One model, resolved.

    Args:
        model: a directory or a GGUF file, as a path.
        tokenizer: a directory, a tokenizer.json or a GGUF file, as a path.
        served_model_name: the names that the API answers to; the first is shown.
        hf_config: the architecture's numbers.
        dtype: float32, bfloat16 or float16; of the weights and activations.
        quantization: one of QUANTIZATIONS. gguf keeps the blocks of a GGUF file, int8
            rounds weights, none dequantises; auto is gguf where that is fast.
        max_model_len: prompt and output together, tokens.
        max_logprobs: the most candidates a request may ask for; -1: the vocabulary.
        logprobs_mode: one of LOGPROBS_MODES.
        default_sampling_params: from generation_config.json and its overrides; what a
            request leaves out.
        generation_eos_token_ids: stop tokens that generation_config.json adds.
        chat_template: overrides the tokenizer's; text, not a path.
    """

    model: str
    tokenizer: str
    served_model_name: tuple[str, ...]
    hf_config: HfConfig
    dtype: str
    max_model_len: int
    quantization: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    generation_eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.hf_config.vocab_size
