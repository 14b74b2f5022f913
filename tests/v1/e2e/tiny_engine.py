"""A small random model with sharp logits, and the engine on it, in this process."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.v1.engine.fakes import NUM_PADDED_IDS, make_tokenizer, save_tokenizer
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetPolicy
from vllm.v1.worker.gpu_worker import Worker

MAX_MODEL_LEN = 128
# A padded id, which no text holds.
NAN_ID = make_tokenizer().get_vocab_size()
VOCAB_SIZE = NAN_ID + NUM_PADDED_IDS
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 32, 48, 4, 2, 16, 2
_MAX_STEPS = 5000


def save_tiny_model(
    directory: Path,
    seed: int = 0,
    blur: float = 0.0,
    alphabet: str = "",
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write a Llama checkpoint with a byte-level tokenizer.

    Args:
        blur: share of noise in the layers' weights: of small shares, the model often
            says what the one without noise says.
        alphabet: characters, at least two, beside which it says nothing; "" for all.
        vocab_size: more than the tokenizer has for a drafter of another model.

    The padded ids at the end of the vocabulary have one embedding, as in many real
    checkpoints: their logits are equal in every row. Whoever reads the token NAN_ID has
    NaN for logits; the head can say it as any other.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.3, generator=generator)

    embedding = draw(vocab_size, _HIDDEN)
    embedding[-NUM_PADDED_IDS:] = embedding[-1]
    weights = {
        "lm_head.weight": embedding.clone(),
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": draw(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": draw(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": draw(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": draw(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": draw(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": draw(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": draw(_HIDDEN, _INTERMEDIATE),
        }
    if alphabet:
        ids = [make_tokenizer().token_to_id(char) for char in alphabet]
        head = torch.zeros_like(embedding)
        head[ids] = 6 * embedding[ids]
        weights["lm_head.weight"] = head
    if blur > 0:
        for name in filter(lambda name: name.endswith("proj.weight"), weights):
            weights[name] += blur * draw(*weights[name].shape)
    embedding[NAN_ID] = float("nan")
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return save_tokenizer(directory)


class ProbedExecutor(UniProcExecutor):
    """Keeps what a step of a test may look at, and starts with a cache of NaN."""

    def __init__(
        self, vllm_config: VllmConfig, budget_policy: BudgetPolicy | None = None
    ) -> None:
        super().__init__(vllm_config, partial(Worker, budget_policy=budget_policy))
        self.num_preempted = 0
        # Requests that came back after a preemption with a part of their output.
        self.resumed: set[str] = set()
        # Accepted drafts -> how often a step verified drafts and accepted so many.
        self.accepted: Counter[int] = Counter()
        self._drafts: dict[str, list[int]] = {}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        # Whoever reads a slot that nobody has written is found out.
        for cache in self.worker.model_runner.kv_caches.values():
            cache.fill_(float("nan"))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_preempted += len(scheduler_output.preempted_req_ids)
        self.resumed |= {
            request.req_id
            for request in scheduler_output.scheduled_new_reqs
            if len(request.prefill_token_ids) > len(request.prompt_token_ids)
        }
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        for req_id in self._drafts:
            batch_idx = output.req_id_to_index[req_id]
            self.accepted[len(output.sampled_token_ids[batch_idx]) - 1] += 1
        return output


class TinyEngine:
    """An engine on the tiny model that runs lists of requests to their end."""

    def __init__(
        self,
        model: Path,
        *,
        budget_policy: BudgetPolicy | None = None,
        log_stats: bool = False,
        **kwargs: Any,
    ) -> None:
        defaults = {
            "device": "cpu",
            "dtype": "float32",
            "max_logprobs": -1,
            "use_tqdm_on_load": False,
        }
        args = EngineArgs(model=str(model), **(defaults | kwargs))
        self.executors: list[ProbedExecutor] = []
        self.budget_policy = budget_policy
        self.engine = LLMEngine(
            args.create_engine_config(),
            log_stats=log_stats,
            executor_factory=self._make_executor,
        )
        self._num_requests = 0

    @property
    def executor(self) -> ProbedExecutor:
        return self.executors[0]

    def _make_executor(self, vllm_config: VllmConfig) -> ProbedExecutor:
        self.executors.append(ProbedExecutor(vllm_config, self.budget_policy))
        return self.executors[-1]

    def add(
        self,
        prompt: Any,
        params: SamplingParams,
        output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    ) -> str:
        request_id = str(self._num_requests)
        self._num_requests += 1
        params = params.clone()
        params.output_kind = output_kind
        self.engine.add_request(request_id, prompt, params)
        return request_id

    def run(
        self, requests: Sequence[tuple[Any, SamplingParams]]
    ) -> list[RequestOutput]:
        """Run the requests together; return their outputs in order."""
        request_ids = [self.add(*request) for request in requests]
        finished, errors = self.drain()
        assert errors == []
        return [finished[request_id] for request_id in request_ids]

    def stream(
        self, requests: Sequence[tuple[Any, SamplingParams]]
    ) -> list[list[CompletionOutput]]:
        """Run the requests together; return the deltas of each in order."""
        streams: dict[str, list[CompletionOutput]] = {
            self.add(*request, RequestOutputKind.DELTA): [] for request in requests
        }
        for _ in range(_MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                break
            for output in self.engine.step():
                streams[output.request_id] += output.outputs
        self.engine.check_integrity()
        return list(streams.values())

    def drain(self) -> tuple[dict[str, RequestOutput], list[Exception]]:
        """Step until nothing is left; return what ended well, and the errors."""
        finished: dict[str, RequestOutput] = {}
        errors: list[Exception] = []
        for _ in range(_MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                break
            try:
                outputs = self.engine.step()
            except (EngineGenerateError, VLLMValidationError) as error:
                errors.append(error)
                continue
            finished |= {output.request_id: output for output in outputs}
        self.engine.check_integrity()
        return finished, errors

    def shutdown(self) -> None:
        self.engine.shutdown()


def visible(output: RequestOutput) -> dict[str, Any]:
    """Return all of an answer that must not depend on what ran beside it."""
    return {
        "prompt_logprobs": output.prompt_logprobs,
        "answers": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "cumulative_logprob": one.cumulative_logprob,
                "logprobs": one.logprobs,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
    }
