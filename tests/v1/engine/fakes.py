"""An executor without a model, and a configuration and tokenizer to go with it."""

import os
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

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
from vllm.exceptions import CheckpointError
from vllm.transformers_utils.config import HfConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

EOS = "<eos>"
# The logits are wider than the tokenizer, as in many models.
NUM_PADDED_IDS = 8


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer: one token a byte, three merges, one EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    vocab = {token: i for i, token in enumerate([*alphabet, "he", "ll", "hell"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def save_tokenizer(directory: Path) -> Path:
    """Write the tokenizer as a model directory would have it."""
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(f'{{"eos_token": "{EOS}"}}')
    return directory


def make_config(
    tokenizer_path: Path,
    *,
    max_model_len: int = 64,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    eos_token_ids: tuple[int, ...] = (),
    generation_eos_token_ids: tuple[int, ...] = (),
    policy: str = "fcfs",
    max_logprobs: int = 20,
    disable_log_stats: bool = False,
) -> VllmConfig:
    """Return a small configuration around the tokenizer."""
    vocab_size = make_tokenizer().get_vocab_size() + NUM_PADDED_IDS
    hf_config = HfConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=max_model_len,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=eos_token_ids,
    )
    return VllmConfig(
        ModelConfig(
            model=str(tokenizer_path),
            tokenizer=str(tokenizer_path),
            served_model_name=("fake",),
            hf_config=hf_config,
            dtype="float32",
            max_model_len=max_model_len,
            max_logprobs=max_logprobs,
            generation_eos_token_ids=generation_eos_token_ids,
        ),
        CacheConfig(num_gpu_blocks_override=num_blocks),
        SchedulerConfig(
            max_num_batched_tokens=256, max_num_seqs=max_num_seqs, policy=policy
        ),
        DeviceConfig(),
        LoadConfig(),
        StructuredOutputsConfig(),
        ObservabilityConfig(disable_log_stats=disable_log_stats),
    )


class ParrotExecutor(Executor):
    """Says the prompt of each request again and again.

    `extra_args` of a request may hold `fail` (the step raises), `exit` (the process
    ends with this status) and `sleep_s` (each of its steps takes so long).
    """

    def init_device(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.num_known: dict[str, int] = {}
        self.extra_args: dict[str, dict] = {}
        self.wants_logprobs: set[str] = set()
        self.step: SchedulerOutput | None = None
        self.num_computed: dict[str, int] = {}

    def load_model(self) -> None:
        pass

    def get_kv_cache_config(self) -> KVCacheConfig:
        spec = FullAttentionSpec(16, 1, 8, torch.float32)
        num_blocks = self.vllm_config.cache_config.num_gpu_blocks_override
        return KVCacheConfig(num_blocks, (KVCacheGroupSpec(("layer",), spec),))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (
            scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids
        ):
            self.prompts.pop(req_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self.prompts[request.req_id] = request.prompt_token_ids
            self.num_known[request.req_id] = len(request.prefill_token_ids)
            self.num_computed[request.req_id] = request.num_computed_tokens
            self.extra_args[request.req_id] = request.sampling_params.extra_args or {}
            if request.sampling_params.num_logprobs is not None:
                self.wants_logprobs.add(request.req_id)
        for req_id in scheduler_output.num_scheduled_tokens:
            extra_args = self.extra_args[req_id]
            if extra_args.get("fail"):
                raise RuntimeError("the device is on fire")
            if "exit" in extra_args:
                os._exit(extra_args["exit"])
            time.sleep(extra_args.get("sleep_s", 0))
        self.step = scheduler_output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        assert self.step is not None
        req_ids = list(self.step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for req_id in req_ids:
            num_scheduled = self.step.num_scheduled_tokens[req_id]
            self.num_computed[req_id] += num_scheduled
            if self.num_computed[req_id] < self.num_known[req_id]:
                sampled.append([])
                continue
            prompt = self.prompts[req_id]
            sampled.append([prompt[self.num_known[req_id] % len(prompt)]])
            self.num_known[req_id] += 1
        return ModelRunnerOutput(
            req_ids,
            {req_id: i for i, req_id in enumerate(req_ids)},
            sampled,
            logprobs=self._logprobs(req_ids, sampled),
        )

    def shutdown(self) -> None:
        pass

    def _logprobs(
        self, req_ids: list[str], sampled: list[list[int]]
    ) -> LogprobsLists | None:
        if not self.wants_logprobs & set(req_ids):
            return None
        ids = np.array([[(ids or [0])[0], 1, 2] for ids in sampled])
        values = np.full(ids.shape, -0.5, dtype=np.float32)
        return LogprobsLists(ids, values, np.ones(len(ids), dtype=np.int32))


class DamagedExecutor(ParrotExecutor):
    """Its checkpoint is damaged."""

    def load_model(self) -> None:
        raise CheckpointError("model.safetensors: is cut off;\n  download it again")


class BrokenExecutor(ParrotExecutor):
    """Fails with an error that nobody foresaw."""

    def load_model(self) -> None:
        raise ZeroDivisionError("division by zero")


class KilledExecutor(ParrotExecutor):
    """Its process ends without a word."""

    def load_model(self) -> None:
        os._exit(7)
