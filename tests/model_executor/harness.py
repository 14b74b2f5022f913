"""Build a configuration for a model and run it over a small paged cache."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.model_loader import load_model
from vllm.transformers_utils.config import HfConfig, load_hf_config
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.selector import get_attn_backend

BLOCK_SIZE = 16


def make_config(
    path: str,
    *,
    hf_config: HfConfig | None = None,
    load_format: str = "auto",
    dtype: str = "float32",
    quantization: str = "none",
    max_model_len: int = 256,
    seed: int = 0,
) -> VllmConfig:
    model_config = ModelConfig(
        model=path,
        tokenizer=path,
        served_model_name=("test",),
        hf_config=hf_config or load_hf_config(path),
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        seed=seed,
    )
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format=load_format, use_tqdm_on_load=False),
        structured_outputs_config=StructuredOutputsConfig(),
        observability_config=ObservabilityConfig(),
    )


def load(path: str, **options: object) -> nn.Module:
    return load_model(make_config(path, **options), torch.device("cpu"))


class Session:
    """One request on a model, with a cache of its own."""

    def __init__(self, model: nn.Module, max_len: int = 256) -> None:
        self.model = model
        self.num_computed = 0
        specs = model.get_kv_cache_specs(BLOCK_SIZE, model.dtype)
        spec = next(iter(specs.values()))
        backend = get_attn_backend(torch.device("cpu"), model.dtype)
        num_blocks = max_len // BLOCK_SIZE + 1
        shape = backend.get_kv_cache_shape(
            num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_size
        )
        self.kv_caches = {name: torch.zeros(shape, dtype=spec.dtype) for name in specs}
        # Block 0 is the null block.
        self.block_table = torch.arange(1, num_blocks, dtype=torch.int32)[None]

    def forward(self, token_ids: Sequence[int]) -> object:
        start, num_tokens = self.num_computed, len(token_ids)
        end = start + num_tokens
        positions = torch.arange(start, end)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=self.block_table,
            slot_mapping=positions + BLOCK_SIZE,
            num_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=end,
            block_size=BLOCK_SIZE,
        )
        self.num_computed = end
        context = ForwardContext(metadata, self.kv_caches)
        with torch.inference_mode(), set_forward_context(context):
            return self.model(torch.tensor(token_ids), positions)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.compute_logits(self.forward(token_ids))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        token_ids = [int(self.logits(prompt)[-1].argmax())]
        while len(token_ids) < num_tokens:
            token_ids.append(int(self.logits(token_ids[-1:])[-1].argmax()))
        return token_ids
