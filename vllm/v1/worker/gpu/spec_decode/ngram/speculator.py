"""A speculator without a model: the text repeats itself."""

import torch

from vllm.config import SpeculativeConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.ngram.lookup import propose_ngram
from vllm.v1.worker.gpu.spec_decode.speculator import Drafts, Speculator
from vllm.v1.worker.gpu.states import RequestState


class NgramSpeculator(Speculator):
    """Drafts what followed the last tokens earlier in the same request.

    Args:
        config: lookup lengths and the number of drafts.
        req_states: the requests' tokens.
    """

    def __init__(self, config: SpeculativeConfig, req_states: RequestState) -> None:
        self._config = config
        self._req_states = req_states

    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
    ) -> Drafts:
        """Look up the suffixes of the requests that have sampled."""
        config, states = self._config, self._req_states
        num_speculative_tokens = config.num_speculative_tokens
        token_ids = states.all_token_ids.gpu
        # Every row may have sampled its drafts and one more.
        max_len = min(
            batch.max_seq_len + 1 + num_speculative_tokens, token_ids.shape[1]
        )
        drafts, num_drafts = propose_ngram(
            token_ids,
            states.total_len.gpu,
            batch.idx_mapping,
            max_len,
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            num_speculative_tokens,
        )
        has_sampled = sampler_output.num_sampled > 0
        return Drafts(
            drafts.masked_fill(~has_sampled.unsqueeze(1), -1),
            num_drafts * has_sampled,
        )
