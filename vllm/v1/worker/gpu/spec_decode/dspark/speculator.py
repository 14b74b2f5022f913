"""A block drafter reads the target's inner states and drafts several tokens a pass."""

import torch

from vllm._cpu_ops_drafter import ContextPiece
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers.dense_decoder import DenseCausalLM
from vllm.model_executor.model_loader import find_drafter_quantization
from vllm.model_executor.model_loader.dspark_loader import load_dspark_model
from vllm.model_executor.models.interfaces import CausalLM
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
from vllm.v1.worker.gpu.spec_decode.draft_sampler import DraftSampler
from vllm.v1.worker.gpu.spec_decode.dspark.context_queue import ContextQueue
from vllm.v1.worker.gpu.spec_decode.dspark.inputs import (
    BlockInputs,
    BlockShape,
    find_context_slots,
    lay_out_blocks,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.speculator import (
    Drafts,
    ScoredDrafts,
    Speculator,
    find_drafting_rows,
)
from vllm.v1.worker.gpu.states import RequestState

# Of context that is not written at once while nothing is drafted: enough for products
# at their best rate, and no burden for the proposal that needs them at last.
_MAX_QUEUED_TOKENS = 64


class DSparkSpeculator(Speculator):
    """Runs the drafter behind the target: context of the step's tokens, then a block.

    Its KV lives in blocks of the same ids as the target's, so that a cached prefix has
    both. A block's own KV is scratch behind the context, and the context of the next
    tokens is written over it.

    Args:
        vllm_config: of the engine.
        req_states: the requests' tokens.
        sampling_states: their temperatures and seeds.
        block_table: of the target and the drafter.
        confidence: what the confidence head's logits are worth, or, without such a
            head, the drafter's certainty.
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
        assert config is not None, "a drafter needs a speculative_config"
        super().__init__(confidence, config.num_speculative_tokens)
        assert config.model is not None, "a drafter needs a path"
        assert config.dspark_config is not None, "a drafter needs its numbers"
        self._path = config.model
        self._target_config = vllm_config.model_config
        self._max_len = config.max_model_len
        self._dspark_config = dspark = config.dspark_config
        # By the number of drafts that they are run for.
        self._block_shapes = {
            max_drafts: BlockShape(
                num_slots=dspark.shortened(max_drafts).block_size,
                # A draft is read from the slot before it, or from its own.
                num_silent=dspark.num_silent_slots,
                max_drafts=max_drafts,
                mask_token_id=dspark.mask_token_id,
                block_size=block_table.block_size,
                max_len=self._max_len,
            )
            for max_drafts in range(1, config.num_speculative_tokens + 1)
        }
        self._req_states = req_states
        self._block_table = block_table
        self._device = device
        self._max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._queue = ContextQueue(_MAX_QUEUED_TOKENS)
        vocab_size = vllm_config.model_config.vocab_size
        # Bounds the logits that exist at once.
        self._max_chunk_reqs = max(
            get_max_chunk_logits(vocab_size) // config.num_speculative_tokens, 1
        )
        self._sampler = DraftSampler(
            config,
            self._max_num_reqs,
            vocab_size,
            sampling_states,
            device,
        )

    @property
    def draft_logits(self) -> torch.Tensor | None:
        return self._sampler.draft_logits

    def load_model(self, target: CausalLM) -> None:
        """Read the weights, and make the target return what the drafter reads."""
        assert isinstance(target, DenseCausalLM), "its layers can be tapped"
        self._model = load_dspark_model(
            self._path,
            self._dspark_config,
            target,
            self._max_len,
            self._device,
            find_drafter_quantization(self._target_config, self._path, self._device),
        )
        if self._model.draft_vocab is not None:
            self._sampler.restrict(self._model.draft_vocab)
        target.set_aux_hidden_state_layers(
            self._dspark_config.aux_hidden_state_layer_ids
        )

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
        return self._model.get_kv_cache_specs(block_size, dtype)

    def initialize_kv_cache(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches

    def profile_run(self, taps: list[torch.Tensor]) -> None:
        """Run the largest context and a block of every request, without attention."""
        device, num_reqs = self._device, self._max_num_reqs
        num_tokens = len(taps[0])
        num_block_tokens = num_reqs * self._dspark_config.block_size
        with set_forward_context(ForwardContext(None, self._kv_caches)):
            fused = self._model.combine_hidden_states(taps)
            places = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self._model.write_context_kv(fused, places, None)
            places = torch.zeros(num_block_tokens, dtype=torch.int64, device=device)
            hidden = self._model(places, places)
        anchors = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        rows = torch.arange(num_reqs, dtype=torch.int32, device=device)
        hidden = hidden[:, : self._num_speculative_tokens]
        self._draw_in_parts(hidden, anchors, rows, anchors, is_all_greedy=False)

    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
        max_drafts: int,
    ) -> Drafts | None:
        """Draft for the requests that have sampled; write the context of all."""
        # Before any block is run: a request may share cache blocks with another one
        # whose prompt was computed in this very step.
        self._queue_context(batch, taps)
        self.catch_up()
        rows_np = find_drafting_rows(batch, self._req_states)
        if not len(rows_np):
            return None
        rows = None
        idx_mapping_np, idx_mapping = batch.idx_mapping_np, batch.idx_mapping
        if len(rows_np) < batch.num_reqs:
            rows = to_device(rows_np, self._device)
            idx_mapping_np, idx_mapping = idx_mapping_np[rows_np], idx_mapping[rows]
        is_all_greedy = self._sampler.prepare(idx_mapping_np)
        drafted = self._draft(batch.max_seq_len, idx_mapping, is_all_greedy, max_drafts)
        return self._complete(batch, rows, drafted)

    def write_context(self, batch: InputBatch, taps: list[torch.Tensor]) -> None:
        self._queue_context(batch, taps)
        if self._queue.is_full:
            self.catch_up()

    def catch_up(self) -> None:
        """Write the context that is queued."""
        pieces = self._queue.take()
        if not pieces:
            return
        with set_forward_context(ForwardContext(None, self._kv_caches)):
            self._model.write_context(pieces)

    def _queue_context(self, batch: InputBatch, taps: list[torch.Tensor]) -> None:
        slot_mapping = batch.slot_mapping
        # Rejected drafts are no context, nor is what is past the drafter's own end.
        if batch.layout.draft_budget > 0 or batch.max_seq_len > self._max_len:
            slot_mapping = find_context_slots(
                self._block_table.rows,
                batch.idx_mapping,
                batch.layout.query_start_loc,
                batch.positions,
                self._req_states.num_computed_tokens.gpu,
                self._block_table.block_size,
                self._max_len,
            )
        self._queue.add(ContextPiece(taps, batch.positions, slot_mapping))

    def _draft(
        self,
        max_seq_len: int,
        idx_mapping: torch.Tensor,
        is_all_greedy: bool,
        max_drafts: int,
    ) -> ScoredDrafts:
        """Return the drafts of these request rows, [R] int32.

        Args:
            max_seq_len: no context of them is longer.
        """
        states, table = self._req_states, self._block_table
        shape = self._block_shapes[max_drafts]
        max_seq_len = min(max_seq_len + shape.num_slots, self._max_len)
        inputs = lay_out_blocks(
            states.all_token_ids.gpu,
            states.num_computed_tokens.gpu,
            table.rows,
            idx_mapping,
            table.count_blocks(max_seq_len),
            shape,
        )
        metadata = AttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            num_tokens=len(inputs.input_ids),
            max_query_len=shape.num_slots,
            max_seq_len=max_seq_len,
            block_size=shape.block_size,
            is_causal=False,
        )
        with set_forward_context(ForwardContext(metadata, self._kv_caches)):
            drafts, scores = self._run_blocks(
                inputs, idx_mapping, is_all_greedy, max_drafts
            )
        return ScoredDrafts(drafts, inputs.num_drafts, scores)

    def _run_blocks(
        self,
        inputs: BlockInputs,
        idx_mapping: torch.Tensor,
        is_all_greedy: bool,
        max_drafts: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return drafts and scores, as `_draw` does; -1 past num_drafts."""
        draws = self._sampler.begin(
            idx_mapping, inputs.anchors, is_all_greedy, max_drafts
        )
        drafted = self._model.maybe_draft(
            inputs.input_ids,
            inputs.positions,
            inputs.num_drafts,
            max_drafts,
            self._max_chunk_reqs,
            self._sampler.for_block(draws),
        )
        if drafted is not None:
            return drafted
        hidden = self._model(inputs.input_ids, inputs.positions)[:, :max_drafts]
        drafts, scores = self._draw_in_parts(
            hidden, inputs.anchor_ids, idx_mapping, inputs.anchors, is_all_greedy
        )
        steps = torch.arange(max_drafts, device=self._device)
        drafts.masked_fill_(steps >= inputs.num_drafts.unsqueeze(1), -1)
        return drafts, scores

    def _draw_in_parts(
        self,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        anchor: torch.Tensor,
        is_all_greedy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `_draw`, for as many requests at a time as there is room for.

        Args:
            hidden: [R, max_drafts, hidden_size]; the others as in `_draw`.
        """
        parts = [
            self._draw(*part, is_all_greedy)
            for part in zip(
                hidden.split(self._max_chunk_reqs),
                anchor_ids.split(self._max_chunk_reqs),
                idx_mapping.split(self._max_chunk_reqs),
                anchor.split(self._max_chunk_reqs),
                strict=True,
            )
        ]
        drafts, scores = map(torch.cat, zip(*parts, strict=True))
        return drafts, scores

    def _draw(
        self,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        anchor: torch.Tensor,
        is_all_greedy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the drafts from left to right, each knowing the one before.

        Args:
            hidden: [R, max_drafts, hidden_size].
            anchor_ids: [R] int64.
            idx_mapping: [R] int32.
            anchor: [R] int64.

        Returns:
            Drafts [R, max_drafts] int64, and their scores float32: the
            logits of their acceptance, or without such a head the certainty.
        """
        model = self._model
        num_rows, num_drafts, _ = hidden.shape
        # One product for all drafts, a draft's rows side by side.
        base = model.compute_base_logits(hidden.transpose(0, 1).flatten(0, 1))
        base = base.view(num_drafts, num_rows, -1)
        draws = self._sampler.begin(idx_mapping, anchor, is_all_greedy, num_drafts)
        if draws is None and model.can_walk:
            drafts, walked = model.walk(base, anchor_ids)
            scores = model.compute_confidence(hidden, walked)
            assert scores is not None, "it has the head for them"
            return drafts, scores
        state = model.initial_markov_state(num_rows, hidden)
        tokens, embeddings, certainty = [anchor_ids], [], []
        for step in range(num_drafts):
            embedding = model.markov_embed(tokens[-1])
            bias, state = model.markov_bias(embedding, hidden[:, step], state)
            logits = base[step] if bias is None else base[step] + bias
            if model.confidence_head is None:
                certainty.append(self._sampler.score(logits, idx_mapping))
            tokens.append(self._sampler.sample(logits, step, draws))
            if embedding is not None:
                embeddings.append(embedding)
        embedded = torch.stack(embeddings, dim=1) if embeddings else None
        scores = model.compute_confidence(hidden, embedded)
        if scores is None:
            scores = torch.stack(certainty, dim=1)
        return torch.stack(tokens[1:], dim=1), scores
