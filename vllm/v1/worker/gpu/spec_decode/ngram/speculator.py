"""A speculator without a model: the text repeats itself."""

import torch

from vllm.config import SpeculativeConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
from vllm.v1.worker.gpu.spec_decode.ngram.lookup import propose_ngram
from vllm.v1.worker.gpu.spec_decode.speculator import (
    Drafts,
    ScoredDrafts,
    Speculator,
    find_drafting_rows,
)
from vllm.v1.worker.gpu.states import RequestState


class NgramSpeculator(Speculator):
    """Drafts what followed the last tokens earlier in the same request.

    Args:
        config: lookup lengths and the number of drafts.
        req_states: the requests' tokens.
        confidence: what a match of some length is worth.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        req_states: RequestState,
        confidence: ConfidenceEstimator,
    ) -> None:
        super().__init__(confidence, config.num_speculative_tokens)
        self._config = config
        self._req_states = req_states

    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
        max_drafts: int,
    ) -> Drafts | None:
        """Look up the suffixes of the requests that have sampled."""
        config, states = self._config, self._req_states
        rows_np = find_drafting_rows(batch, states)
        if not len(rows_np):
            return None
        token_ids = states.all_token_ids.gpu
        device = token_ids.device
        # Every row may have sampled its drafts and one more.
        max_len = min(
            batch.max_seq_len + 1 + config.num_speculative_tokens, token_ids.shape[1]
        )
        rows = to_device(rows_np, device)
        found, num_found, match_len = propose_ngram(
            token_ids,
            states.total_len.gpu,
            batch.idx_mapping[rows],
            max_len,
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            max_drafts,
        )
        scores = match_len.float().log2().unsqueeze(1).expand(found.shape)
        return self._complete(batch, rows, ScoredDrafts(found, num_found, scores))
