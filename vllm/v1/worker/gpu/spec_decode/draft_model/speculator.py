"""A smaller model of the same vocabulary drafts token by token."""

from dataclasses import replace

import torch

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.model_loader import (
    find_drafter_quantization,
    load_model,
)
from vllm.model_executor.models.interfaces import CausalLM
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.batch_layout import prefix_sum
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
from vllm.v1.worker.gpu.spec_decode.draft_model.inputs import (
    DraftInputs,
    gather_committed_inputs,
    gather_draft_inputs,
)
from vllm.v1.worker.gpu.spec_decode.draft_sampler import DraftSampler
from vllm.v1.worker.gpu.spec_decode.speculator import (
    Drafts,
    ScoredDrafts,
    Speculator,
    find_drafting_rows,
)
from vllm.v1.worker.gpu.states import RequestState

# The cache's layers are named by both models; the drafter's get a name of their own.
_LAYER_PREFIX = "draft_model."


class DraftModelSpeculator(Speculator):
    """Runs the drafter behind the target: over the step's tokens, then over its drafts.

    Its KV lives in blocks of the same ids as the target's, so that a cached prefix has
    both. A place where a draft was rejected is written again when its token is known.

    Args:
        vllm_config: of the engine.
        req_states: the requests' tokens.
        sampling_states: their temperatures and seeds.
        block_table: of the target and the drafter.
        confidence: what the drafter's certainty is worth.
        device: where the drafter runs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        req_states: RequestState,
        sampling_states: SamplingStates,
        block_table: BlockTable,
        confidence: ConfidenceEstimator,
        device: torch.device,
    ) -> None:
        config = vllm_config.speculative_config
        assert config is not None, "a draft model needs a speculative_config"
        super().__init__(confidence, config.num_speculative_tokens)
        assert config.model is not None, "a draft model needs a path"
        assert config.draft_hf_config is not None, "a draft model needs its numbers"
        self._config = config
        self._target_config = vllm_config.model_config
        self._draft_vllm_config = replace(
            vllm_config,
            model_config=replace(
                vllm_config.model_config,
                model=config.model,
                hf_config=config.draft_hf_config,
            ),
            speculative_config=None,
        )
        self._req_states = req_states
        self._block_table = block_table
        self._device = device
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._sampler = DraftSampler(
            config,
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.vocab_size,
            sampling_states,
            device,
        )

    @property
    def draft_logits(self) -> torch.Tensor | None:
        return self._sampler.draft_logits

    def load_model(self, target: CausalLM) -> None:
        draft_config = self._draft_vllm_config
        method = find_drafter_quantization(
            self._target_config, draft_config.model_config.model, self._device
        )
        self._model = load_model(draft_config, self._device, method)

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
        specs = self._model.get_kv_cache_specs(block_size, dtype)
        return {_LAYER_PREFIX + name: spec for name, spec in specs.items()}

    def initialize_kv_cache(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = {
            name.removeprefix(_LAYER_PREFIX): cache
            for name, cache in kv_caches.items()
            if name.startswith(_LAYER_PREFIX)
        }

    def profile_run(self, taps: list[torch.Tensor]) -> None:
        """Run the largest step's tokens and one sampled token of every request."""
        config = self._draft_vllm_config.scheduler_config
        num_tokens = config.max_num_batched_tokens + config.max_num_seqs
        input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        with set_forward_context(ForwardContext(None, self._kv_caches)):
            hidden_states = self._model(input_ids, input_ids)
        assert isinstance(hidden_states, torch.Tensor), "nobody has asked for taps"
        self._model.compute_logits(hidden_states[: config.max_num_seqs])

    def write_context(self, batch: InputBatch, taps: list[torch.Tensor]) -> None:
        """Run the drafter over the step's known tokens."""
        self._run_committed(batch)

    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
        max_drafts: int,
    ) -> Drafts | None:
        """Draft for the requests that have sampled; fill the cache for the others."""
        hidden_states = self._run_committed(batch)
        rows_np = find_drafting_rows(batch, self._req_states)
        if not len(rows_np):
            return None
        rows = to_device(rows_np, self._device)
        is_all_greedy = self._sampler.prepare(batch.idx_mapping_np[rows_np])
        drafted = self._draft(
            batch, rows, hidden_states[rows], is_all_greedy, max_drafts
        )
        return self._complete(batch, rows, drafted)

    def _run_committed(self, batch: InputBatch) -> torch.Tensor:
        """Compute the step's known tokens; return [num_reqs, hidden] of each last."""
        layout = batch.layout
        num_tokens_np = layout.num_scheduled_tokens_np + layout.is_sampling_np
        query_start_loc_np = prefix_sum(num_tokens_np)
        max_seq_len = batch.max_seq_len + 1
        states = self._req_states
        blocks = self._block_table.gather(batch.idx_mapping, max_seq_len)
        query_start_loc = to_device(query_start_loc_np, self._device)
        inputs = gather_committed_inputs(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            batch.idx_mapping,
            batch.positions[layout.query_start_loc[:-1].long()],
            query_start_loc,
            blocks,
            self._block_table.block_size,
            self._config.max_model_len,
            int(query_start_loc_np[-1]),
        )
        hidden_states = self._forward(
            inputs, query_start_loc, blocks, int(num_tokens_np.max()), max_seq_len
        )
        return hidden_states[inputs.last_token_idx]

    def _draft(
        self,
        batch: InputBatch,
        rows: torch.Tensor,
        hidden_states: torch.Tensor,
        is_all_greedy: bool,
        max_drafts: int,
    ) -> ScoredDrafts:
        """Return the drafts of these requests of the batch."""
        idx_mapping = batch.idx_mapping[rows]
        anchor = self._req_states.total_len.gpu[idx_mapping].long() - 1
        # A step commits at most its scheduled tokens' worth and one more.
        max_seq_len = batch.max_seq_len + 1 + max_drafts
        blocks = self._block_table.gather(idx_mapping, max_seq_len)
        query_start_loc = torch.arange(
            len(rows) + 1, dtype=torch.int32, device=self._device
        )
        draws = self._sampler.begin(idx_mapping, anchor, is_all_greedy, max_drafts)
        drafts: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for step in range(max_drafts):
            if step > 0:
                inputs = gather_draft_inputs(
                    drafts[-1],
                    anchor + step,
                    blocks,
                    self._block_table.block_size,
                    self._config.max_model_len,
                )
                hidden_states = self._forward(
                    inputs, query_start_loc, blocks, 1, max_seq_len
                )
            logits = self._model.compute_logits(hidden_states)
            scores.append(self._sampler.score(logits, idx_mapping))
            drafts.append(self._sampler.sample(logits, step, draws))
        # A draft is read from the token before it, which must have a place.
        num_read = (self._config.max_model_len - anchor).clamp(0, max_drafts)
        steps = torch.arange(max_drafts, device=self._device)
        token_ids = torch.stack(drafts, dim=1)
        token_ids.masked_fill_(steps >= num_read.unsqueeze(1), -1)
        return ScoredDrafts(
            token_ids, num_read.to(torch.int32), torch.stack(scores, dim=1)
        )

    def _forward(
        self,
        inputs: DraftInputs,
        query_start_loc: torch.Tensor,
        blocks: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
    ) -> torch.Tensor:
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=blocks,
            slot_mapping=inputs.slot_mapping,
            num_tokens=len(inputs.input_ids),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_size=self._block_table.block_size,
        )
        with set_forward_context(ForwardContext(metadata, self._kv_caches)):
            hidden_states = self._model(inputs.input_ids, inputs.positions)
        assert isinstance(hidden_states, torch.Tensor), "nobody has asked for taps"
        return hidden_states
