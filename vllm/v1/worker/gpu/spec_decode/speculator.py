"""The interface of everything that drafts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from vllm.model_executor.models.interfaces import CausalLM
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState


@dataclass(frozen=True)
class Drafts:
    """What a speculator proposes for the next step, on the device.

    Args:
        token_ids: [num_reqs, num_speculative_tokens] int64; -1 past num_drafts.
        num_drafts: [num_reqs] int32; 0 for a request that has not sampled, or that
            allows none.
        confidence_probs: [num_reqs, num_speculative_tokens] float32, the probability
            that a draft is accepted if those before it are, known before the draft is
            drawn; None if the speculator has no idea.
    """

    token_ids: torch.Tensor
    num_drafts: torch.Tensor
    confidence_probs: torch.Tensor | None = None


class Speculator(ABC):
    """Proposes drafts for a batch of requests, without a wait for the device."""

    @property
    def draft_logits(self) -> torch.Tensor | None:
        """[max_num_reqs, num_speculative_tokens, vocab_size] float32 by request row.

        Of the last proposals, as the drafts were drawn from their softmax; None if
        drafts are not drawn.
        """
        return None

    def load_model(  # noqa: B027 - not every speculator has a model
        self, target: CausalLM
    ) -> None:
        """Read the weights; nothing to do for a speculator without any.

        Args:
            target: loaded; it can be asked for taps, and lend what a drafter shares.
        """

    def get_kv_cache_specs(self, block_size: int) -> dict[str, FullAttentionSpec]:
        """Return layer name -> spec of the layers that need a cache of their own."""
        return {}

    def initialize_kv_cache(  # noqa: B027 - not every speculator has a cache
        self, kv_caches: dict[str, torch.Tensor]
    ) -> None:
        """Take the caches of the layers above."""

    def profile_run(  # noqa: B027 - not every speculator has a model
        self, taps: list[torch.Tensor]
    ) -> None:
        """Make the largest proposal without attention, for the peak of its memory.

        Args:
            taps: of as many tokens as a step can have.
        """

    @abstractmethod
    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
    ) -> Drafts | None:
        """Draft what follows the tokens that the step has sampled.

        The request rows are already advanced by them. Nothing is drafted for a request
        that allows no drafts; what later drafts need of its tokens is kept all the
        same.

        Args:
            batch: of the step.
            sampler_output: of the step.
            hidden_states: [num_tokens, hidden_size] of the target.
            taps: [num_tokens, hidden_size] each, of the layers that `load_model` asked
                the target for; empty if it asked for none.

        Returns:
            None if the host knows that no request of the batch gets a draft.
        """


def find_drafting_rows(batch: InputBatch, req_states: RequestState) -> np.ndarray:
    """Return the batch rows that have sampled and may have drafts, as the host knows.

    Args:
        batch: of the step.
        req_states: the requests' own limits.
    """
    is_sampling = np.diff(batch.layout.cu_num_logits_np) > 0
    return np.flatnonzero(
        is_sampling & (req_states.max_num_drafts_np[batch.idx_mapping_np] > 0)
    )
