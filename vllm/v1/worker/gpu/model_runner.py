"""The step: rows in, one forward pass, samples out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.model_loader import load_model
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.worker.gpu.async_utils import (
    AsyncDrafts,
    AsyncOutput,
    VerificationRecord,
    make_copy_stream,
)
from vllm.v1.worker.gpu.attn_utils import (
    allocate_kv_caches,
    build_attn_metadata,
    choose_kv_cache_dtype,
    group_kv_cache_specs,
)
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output_rows import OutputRows
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobs
from vllm.v1.worker.gpu.sample.sampler import Sampler, SamplingRows
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerifier,
    VerificationPlan,
)
from vllm.v1.worker.gpu.spec_decode.factory import make_speculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.verified_layout import make_verified_layout
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.step_requests import StepReader
from vllm.v1.worker.gpu.step_rows import StepRows
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker


@dataclass(frozen=True)
class _ExecutedStep:
    """What `execute_model` leaves for `sample_tokens`."""

    batch: InputBatch
    plan: VerificationPlan
    hidden_states: torch.Tensor
    taps: list[torch.Tensor]


class GPUModelRunner:
    """Runs a model over persistent request rows, on any device.

    Args:
        vllm_config: of the engine.
        device: where the model and the rows live.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        model_config = vllm_config.model_config
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        num_bonus = DefaultModelState().num_new_sampled_tokens_per_step
        rows_per_req = vllm_config.num_speculative_tokens + num_bonus

        self.num_bonus_tokens = num_bonus
        self.vocab_size = model_config.vocab_size
        self.req_states = RequestState(
            max_num_reqs,
            model_config.max_model_len,
            vllm_config.num_speculative_tokens,
            device,
        )
        self.sampler = Sampler(
            max_num_reqs,
            self.vocab_size,
            device,
            model_config.logprobs_mode,
            seed=model_config.seed,
        )
        self.prompt_logprobs = PromptLogprobs(
            max_num_reqs, self.vocab_size, device, model_config.logprobs_mode
        )
        self.structured_outputs = StructuredOutputsWorker(
            max_num_reqs * rows_per_req,
            self.vocab_size,
            device,
            mask_stride=rows_per_req,
            num_bonus_tokens=num_bonus,
        )
        self.block_table = BlockTable(
            max_num_reqs,
            model_config.max_model_len,
            vllm_config.cache_config.block_size,
            device,
        )
        self._reader = StepReader(self.req_states, num_bonus, device)
        self._step_rows = StepRows(self.req_states, self.block_table)
        self.speculator = make_speculator(
            vllm_config, self.req_states, self.sampler.states, self.block_table, device
        )
        self.verifier = AdaptiveVerifier(
            max_num_reqs, vllm_config.num_speculative_tokens, device
        )
        self.rejection_sampler = RejectionSampler(
            self.sampler, vllm_config.speculative_config
        )
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.dtype: torch.dtype = getattr(torch, model_config.dtype)
        self._copy_stream = make_copy_stream(device)
        # No weight asks for a gradient. What the mode spares torch's own operators is
        # worth entering it only where a step has many of them; but what is made in it,
        # such as these rows by a caller who is in it, can be written in it only.
        is_free = device.type == "cpu" and not torch.is_inference_mode_enabled()
        self._step_mode: AbstractContextManager[object] = (
            nullcontext() if is_free else torch.inference_mode()
        )
        self._executed: _ExecutedStep | None = None
        self._drafts: AsyncDrafts | None = None

    def load_model(self) -> None:
        """Build the model and read its weights."""
        self.model = load_model(self.vllm_config, self.device)
        if self.speculator is not None:
            self.speculator.load_model(self.model)

    @property
    def attn_backend(self) -> type[AttentionBackend]:
        """What attends in the model and its drafter."""
        return get_attn_backend(self.device, self.dtype)

    def get_kv_cache_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """Return the layers that need a cache, grouped by block table."""
        cache_config = self.vllm_config.cache_config
        dtype = choose_kv_cache_dtype(cache_config.cache_dtype, self.dtype)
        specs = self.model.get_kv_cache_specs(cache_config.block_size, dtype)
        if self.speculator is not None:
            specs = specs | self.speculator.get_kv_cache_specs(
                cache_config.block_size, dtype
            )
        return group_kv_cache_specs(specs)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the paged cache."""
        self.kv_caches = allocate_kv_caches(config, self.attn_backend, self.device)
        if self.speculator is not None:
            self.speculator.initialize_kv_cache(self.kv_caches)

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Run the largest step without attention, for the peak of its memory."""
        scheduler_config = self.vllm_config.scheduler_config
        num_tokens = scheduler_config.max_num_batched_tokens
        input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden_states, taps = self._forward(input_ids, input_ids, None)
        rows_per_req = self.num_bonus_tokens + self.vllm_config.num_speculative_tokens
        num_logits = scheduler_config.max_num_seqs * rows_per_req
        self.model.compute_logits(hidden_states[:num_logits])
        if self.speculator is not None:
            self.speculator.profile_run(taps)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Update the rows and run the forward pass of a step.

        `sample_tokens` must follow, even if nothing was scheduled.
        """
        assert self._executed is None, "the last step has not been sampled"
        with self._step_mode:
            self._update_rows(scheduler_output)
            if scheduler_output.total_num_scheduled_tokens == 0:
                return
            batch, plan = self._prepare_inputs(scheduler_output)
            hidden_states, taps = self._forward(batch.input_ids, batch.positions, batch)
        self._executed = _ExecutedStep(batch, plan, hidden_states, taps)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step that `execute_model` ran and advance the rows."""
        if self._executed is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        executed, self._executed = self._executed, None
        with self._step_mode:
            return self._sample_executed(executed, grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts that the last step proposed; None if there are none."""
        drafts, self._drafts = self._drafts, None
        return None if drafts is None else drafts.get_output()

    def _sample_executed(
        self, executed: _ExecutedStep, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput:
        batch, hidden_states = executed.batch, executed.hidden_states
        sampler_output = self._sample(batch, hidden_states, grammar_output)
        prompt_logprobs = self._compute_prompt_logprobs(batch, hidden_states)
        output = AsyncOutput(
            batch.req_ids,
            sampler_output,
            prompt_logprobs,
            VerificationRecord(
                batch.layout,
                executed.plan.admitted,
                self.verifier.get_confidences(batch.layout, batch.idx_mapping),
                self.verifier.take_step_cost(),
            ),
            self._copy_stream,
        )
        self._advance_rows(batch, sampler_output)
        self._propose(executed, sampler_output)
        return output.get_output()

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        left = scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids
        new_reqs = scheduler_output.scheduled_new_reqs
        cached = scheduler_output.scheduled_cached_reqs
        # Most steps go on with the rows as they are.
        if not (left or new_reqs or any(cached.new_block_ids)):
            return
        for req_id in left:
            self._remove_request(req_id)
        for request in new_reqs:
            self._add_request(request)
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                req_state_idx = self.req_states.req_id_to_index[req_id]
                self.block_table.append_block_ids(req_state_idx, block_ids[0])
        self.req_states.apply_staged_writes()
        self.block_table.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.verifier.apply_staged_writes()

    def _add_request(self, request: NewRequestData) -> None:
        req_state_idx = self.req_states.add_request(
            request.req_id,
            len(request.prompt_token_ids),
            request.prefill_token_ids,
            request.num_computed_tokens,
            request.sampling_params.num_speculative_tokens,
        )
        self.block_table.set_block_ids(req_state_idx, request.block_ids[0])
        self.verifier.add_request(req_state_idx)
        self.sampler.add_request(
            req_state_idx,
            request.req_id,
            request.sampling_params,
            request.prompt_token_ids,
            request.prefill_token_ids,
        )
        self.prompt_logprobs.add_request(
            req_state_idx,
            request.req_id,
            request.sampling_params,
            request.prompt_token_ids,
            request.prefill_token_ids,
        )

    def _remove_request(self, req_id: str) -> None:
        req_state_idx = self.req_states.remove_request(req_id)
        if req_state_idx is not None:
            self.sampler.remove_request(req_state_idx)
            self.prompt_logprobs.remove_request(req_state_idx)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[InputBatch, VerificationPlan]:
        requests, num_computed = self._reader.read(scheduler_output)
        step = requests.scheduled
        plan = self.verifier.plan(step, requests.idx_mapping, requests.max_drafts_np)
        layout = make_verified_layout(step, plan.draft_budget, plan.admitted)
        return self._step_rows.prepare(requests, layout, num_computed), plan

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: InputBatch | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the hidden states, and the taps that the speculator asked for."""
        metadata = None
        if batch is not None:
            metadata = build_attn_metadata(batch, self.block_table.block_size)
        with set_forward_context(ForwardContext(metadata, self.kv_caches)):
            output = self.model(input_ids, positions)
        return (output, []) if isinstance(output, torch.Tensor) else output

    def _sample(
        self,
        batch: InputBatch,
        hidden_states: torch.Tensor,
        grammar_output: GrammarOutput | None,
    ) -> SamplerOutput:
        outputs = OutputRows(self.model, batch.take_logit_rows(hidden_states))
        rows = SamplingRows.from_batch(batch, self.req_states.all_token_ids.gpu)
        apply_grammar = None
        if grammar_output is not None:
            apply_grammar = partial(
                self.structured_outputs.apply_grammar_bitmask,
                layout=batch.layout,
                req_ids=batch.req_ids,
                grammar_output=grammar_output,
            )
        if batch.layout.draft_budget == 0:
            return self.sampler(outputs, rows, apply_grammar)
        draft_logits = None if self.speculator is None else self.speculator.draft_logits
        return self.rejection_sampler(outputs, rows, draft_logits, apply_grammar)

    def _propose(self, executed: _ExecutedStep, sampler_output: SamplerOutput) -> None:
        if self.speculator is None:
            return
        batch, taps = executed.batch, executed.taps
        max_drafts = executed.plan.max_next_drafts
        if max_drafts == 0:
            self.speculator.write_context(batch, taps)
            return
        drafts = self.speculator.propose(
            batch, sampler_output, executed.hidden_states, taps, max_drafts
        )
        if drafts is None:
            return
        self.req_states.keep_drafts(batch.idx_mapping, drafts.token_ids)
        self.verifier.observe_drafts(batch.idx_mapping_np, batch.idx_mapping, drafts)
        self._drafts = AsyncDrafts(
            batch.req_ids, drafts.token_ids, drafts.num_drafts, self._copy_stream
        )

    def _compute_prompt_logprobs(
        self, batch: InputBatch, hidden_states: torch.Tensor
    ) -> dict[str, LogprobsTensors]:
        return self.prompt_logprobs.collect(
            batch, hidden_states, self.model.compute_logits
        )

    def _advance_rows(self, batch: InputBatch, sampler_output: SamplerOutput) -> None:
        self._step_rows.advance(batch, sampler_output)
        self.sampler.post_update(batch.idx_mapping, sampler_output)
        if self.speculator is not None and batch.layout.num_scheduled_drafts > 0:
            self.speculator.observe_acceptance(batch, sampler_output)
