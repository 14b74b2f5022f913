"""The numbers of an architecture, in Hugging Face's words."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HfConfig:
    """The part of a config.json that the models read, checked and complete.

    Args:
        architecture: the class name in `architectures`, such as "LlamaForCausalLM".
        head_dim: size of one head; hidden_size / num_attention_heads if not given.
        rope_scaling: the dict of config.json, with `rope_type` set; None for none.
        attention_bias: q, k and v projections have a bias.
        attention_out_bias: the output projection has a bias.
        eos_token_ids: of config.json, possibly several.
        torch_dtype: what the checkpoint was saved in.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
