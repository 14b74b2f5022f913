"""A worker that checks its blocks, a grammar, and small configurations."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.transformers_utils.config import HfConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

VOCAB_SIZE = 1000
BLOCK_SIZE = 4

HF_CONFIG = HfConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def make_config(
    *,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    policy: str = "fcfs",
    num_drafts: int = 0,
    model: str = "model",
    spec_decode_metrics: str = "none",
) -> VllmConfig:
    return VllmConfig(
        ModelConfig(model, model, (model,), HF_CONFIG, "float32", max_model_len),
        CacheConfig(block_size, enable_prefix_caching=enable_prefix_caching),
        SchedulerConfig(
            max_num_batched_tokens, max_num_seqs, enable_chunked_prefill, policy
        ),
        DeviceConfig(),
        LoadConfig(),
        StructuredOutputsConfig(),
        ObservabilityConfig(per_request_spec_decode_metrics=spec_decode_metrics),
        # A drafter with a cache of its own, which needs room ahead.
        SpeculativeConfig("draft_model", num_drafts) if num_drafts else None,
    )


def make_kv_cache_config(
    num_blocks: int, block_size: int = BLOCK_SIZE, num_groups: int = 1
) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size, 1, 8, torch.float32)
    groups = (KVCacheGroupSpec((f"layer.{i}",), spec) for i in range(num_groups))
    return KVCacheConfig(num_blocks, tuple(groups))


class FakeGrammar:
    """Accepts the literal `token_ids` and is closed behind it."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_accepted = 0
        self.failure: str | None = None
        self.takes_drafts = True


class FakeGrammarManager:
    """Keeps to the interface of the structured output manager."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def grammar_bitmask(self, requests, request_ids, drafts) -> GrammarOutput:
        num_rows = sum(
            1 + len(drafts.get(request_id, ())) for request_id in request_ids
        )
        assert all(request_id in requests for request_id in request_ids)
        return GrammarOutput(list(request_ids), np.zeros((num_rows, 1), np.int32))

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        assert not self.is_terminated(request), "a closed grammar is asked again"
        grammar = request.structured_output_request.grammar
        end = grammar.num_accepted + len(token_ids)
        self.accepted.extend(token_ids)
        if grammar.token_ids[grammar.num_accepted : end] != token_ids:
            return False
        grammar.num_accepted = end
        return True

    def takes_drafts(self, request: Request) -> bool:
        grammar = getattr(request.structured_output_request, "grammar", None)
        return grammar is None or grammar.takes_drafts

    def is_terminated(self, request: Request) -> bool:
        grammar = request.structured_output_request.grammar
        return grammar.num_accepted == len(grammar.token_ids)

    def get_failure(self, request: Request) -> str | None:
        return request.structured_output_request.grammar.failure


class FakeStructuredOutputRequest(SimpleNamespace):
    """The state that the manager hangs on a request; compiling at first."""

    def __init__(self) -> None:
        super().__init__(grammar=None, error=None)

    @property
    def is_grammar_ready(self) -> bool:
        return self.grammar is not None


def make_scheduler(
    num_blocks: int = 65,
    *,
    manager: FakeGrammarManager | None = None,
    log_stats: bool = True,
    num_groups: int = 1,
    **config,
) -> Scheduler:
    vllm_config = make_config(**config)
    kv_cache_config = make_kv_cache_config(
        num_blocks, vllm_config.cache_config.block_size, num_groups
    )
    return Scheduler(
        vllm_config, kv_cache_config, manager or FakeGrammarManager(), log_stats
    )


def make_request(
    scheduler: Scheduler,
    request_id: str,
    prompt: list[int] | int,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    parent: str | None = None,
    grammar: bool = False,
    **params,
) -> Request:
    """Make a request without adding it; an int is a prompt length of its own tokens."""
    if isinstance(prompt, int):
        start = sum(map(ord, request_id)) * 7
        prompt = [(start + i) % VOCAB_SIZE for i in range(prompt)]
    if grammar:
        params["structured_outputs"] = StructuredOutputsParams(regex="x")
    stop_token_ids = params.get("stop_token_ids") or []
    sampling_params = SamplingParams(**{"max_tokens": 8, **params})
    sampling_params.all_stop_token_ids = stop_token_ids
    request = Request.from_engine_core_request(
        EngineCoreRequest(
            request_id,
            prompt,
            sampling_params,
            arrival_time,
            priority,
            cache_salt,
            parent,
        ),
        scheduler.block_hasher,
    )
    if grammar:
        request.structured_output_request = FakeStructuredOutputRequest()
    return request


def add_request(scheduler: Scheduler, request_id: str, prompt, **kwargs) -> Request:
    request = make_request(scheduler, request_id, prompt, **kwargs)
    scheduler.add_request(request)
    return request


def next_token(context: int) -> int:
    """The only continuation of a context."""
    return (context * 2654435761 >> 7) % VOCAB_SIZE


def extend_context(context: int, token_id: int) -> int:
    return hash((context, token_id)) & 0xFFFFFFFF


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    """What a request gets when it runs alone, without any stop."""
    context = 0
    for token_id in prompt:
        context = extend_context(context, token_id)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(context))
        context = extend_context(context, output[-1])
    return output


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int


class FakeWorker:
    """Writes a context into each slot, reads all earlier ones back, continues them.

    A slot that does not hold the request's own context at its position (a block freed
    too early, shared wrongly, or found before it was written) fails the step.

    Args:
        num_drafts: drafts that `propose` makes.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, num_drafts: int = 0) -> None:
        self.block_size = block_size
        self.num_drafts = num_drafts
        self.rows: dict[str, _Row] = {}
        self.slots: dict[int, int] = {}
        # Replaces what a request samples, by request id.
        self.overrides: dict[str, Callable[[list[int]], list[int]]] = {}
        self.nan_req_ids: set[str] = set()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._update_rows(output)
        assert output.total_num_scheduled_tokens == sum(
            output.num_scheduled_tokens.values()
        )
        drafts = output.scheduled_spec_decode_tokens
        inputs = {
            request_id: self._write(
                self.rows[request_id], num_tokens, drafts.get(request_id, [])
            )
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        }
        sampled = [
            self._sample(request_id, *inputs[request_id], drafts.get(request_id, []))
            for request_id in inputs
        ]
        cu_num = np.cumsum([0] + [len(ids) for ids in sampled]).tolist()
        flat = np.array([[i] for ids in sampled for i in ids]).reshape(-1, 1)
        return ModelRunnerOutput(
            list(inputs),
            {request_id: index for index, request_id in enumerate(inputs)},
            sampled,
            LogprobsLists(flat, -flat.astype(np.float32), flat[:, 0], cu_num),
            num_nans_in_logits={i: 1 for i in self.nan_req_ids if i in inputs},
        )

    def propose(self, output: ModelRunnerOutput) -> tuple[list[str], list[list[int]]]:
        """Draft: the first two right, the rest wrong."""
        drafts = []
        for request_id in output.req_ids:
            row = self.rows[request_id]
            right = expected_output(row.token_ids, min(self.num_drafts, 2))
            drafts.append(right + [0] * (self.num_drafts - len(right)))
        return output.req_ids, drafts

    def _update_rows(self, output: SchedulerOutput) -> None:
        gone = output.finished_req_ids | output.preempted_req_ids
        for request_id in gone:
            assert request_id in self.rows, f"{request_id} has no row to free"
            del self.rows[request_id]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows, f"{new.req_id} has a row already"
            self.rows[new.req_id] = _Row(
                new.prefill_token_ids, list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            strict=True,
        ):
            row = self.rows[request_id]
            assert row.num_computed == num_computed, f"{request_id}: counts differ"
            row.block_ids.extend(block_ids[0] if block_ids is not None else ())

    def _write(
        self, row: _Row, num_tokens: int, drafts: list[int]
    ) -> tuple[list[int], int]:
        token_ids = row.token_ids + drafts
        end = row.num_computed + num_tokens
        assert end <= len(token_ids), "more tokens than are known"
        assert not drafts or end == len(token_ids), "drafts behind an incomplete prompt"
        contexts = [0]
        for token_id in token_ids[:end]:
            contexts.append(extend_context(contexts[-1], token_id))
        for position in range(row.num_computed, end):
            self.slots[self._slot(row, position)] = contexts[position + 1]
        return contexts, end

    def _sample(
        self, request_id: str, contexts: list[int], end: int, drafts: list[int]
    ) -> list[int]:
        row = self.rows[request_id]
        for position in range(end):
            assert self.slots[self._slot(row, position)] == contexts[position + 1], (
                f"{request_id} reads a foreign slot at {position}"
            )
        row.num_computed = end
        if end < len(row.token_ids):
            return []
        tokens = []
        for draft in [*drafts, None]:
            num_known = end - len(drafts) + len(tokens)
            tokens.append(next_token(contexts[num_known]))
            if tokens[-1] != draft:
                break
        row.num_computed -= len(drafts) + 1 - len(tokens)
        if request_id in self.overrides:
            tokens = self.overrides[request_id](tokens)
        row.token_ids = row.token_ids + tokens
        return tokens

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert block_id != 0, "the null block holds no tokens"
        return block_id * self.block_size + position % self.block_size


def run_step(
    scheduler: Scheduler,
    worker: FakeWorker,
    while_running: Callable[[], None] = lambda: None,
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Run a step as the engine core does, and check every count."""
    output = scheduler.schedule()
    scheduler.check_integrity()
    assert output.total_num_scheduled_tokens <= scheduler.limits.max_num_batched_tokens
    while_running()
    grammar = scheduler.get_grammar_bitmask(output)
    result = worker.execute(output)
    outputs = scheduler.update_from_output(output, result, grammar).outputs
    if worker.num_drafts:
        scheduler.update_draft_token_ids(*worker.propose(result))
    scheduler.check_integrity()
    return output, outputs


def run_all(
    scheduler: Scheduler, worker: FakeWorker | None = None, max_steps: int = 2000
) -> dict[str, EngineCoreOutput]:
    """Run until nothing is left; return each request's outputs as one."""
    worker = worker or FakeWorker()
    total: dict[str, EngineCoreOutput] = {}
    for _ in range(max_steps):
        if not scheduler.has_requests():
            return total
        for output in run_step(scheduler, worker)[1]:
            collect(total, output)
    raise AssertionError("the requests do not end")


def collect(total: dict[str, EngineCoreOutput], output: EngineCoreOutput) -> None:
    """Add an output to what its request had before."""
    known = total.setdefault(output.request_id, output)
    if known is not output:
        assert known.finish_reason is None, f"{output.request_id} goes on after its end"
        known.new_token_ids = known.new_token_ids + output.new_token_ids
        known.finish_reason = output.finish_reason
        known.stop_reason = output.stop_reason
        known.error = output.error


def sampled_output(
    output: SchedulerOutput, **token_ids: list[int]
) -> ModelRunnerOutput:
    """Make a worker's answer by hand; requests not named sample nothing."""
    req_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids,
        {request_id: index for index, request_id in enumerate(req_ids)},
        [token_ids.get(request_id, []) for request_id in req_ids],
    )
