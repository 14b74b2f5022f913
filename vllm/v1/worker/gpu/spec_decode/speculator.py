"""The interface of everything that drafts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from vllm.model_executor.models.interfaces import CausalLM
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
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
            drawn; 0 past num_drafts.
    """

    token_ids: torch.Tensor
    num_drafts: torch.Tensor
    confidence_probs: torch.Tensor


@dataclass(frozen=True)
class ScoredDrafts:
    """Drafts of some requests of a batch, before anybody says what they are worth.

    Args:
        token_ids: [num_rows, max_drafts] int64; -1 past num_drafts.
        num_drafts: [num_rows] int32.
        scores: [num_rows, max_drafts] float32, each known before its draft is drawn.
    """

    token_ids: torch.Tensor
    num_drafts: torch.Tensor
    scores: torch.Tensor

    def widened(self, num_speculative_tokens: int) -> "ScoredDrafts":
        """Return them as rows of so many places."""
        num_missing = num_speculative_tokens - self.token_ids.shape[1]
        if num_missing == 0:
            return self
        return ScoredDrafts(
            pad(self.token_ids, (0, num_missing), value=-1),
            self.num_drafts,
            pad(self.scores, (0, num_missing)),
        )


class Speculator(ABC):
    """Proposes drafts for a batch of requests, without a wait for the device.

    Args:
        confidence: what the drafts' scores are worth.
        num_speculative_tokens: the most drafts of a request.
    """

    def __init__(
        self, confidence: ConfidenceEstimator, num_speculative_tokens: int
    ) -> None:
        self._confidence = confidence
        self._num_speculative_tokens = num_speculative_tokens

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

    def get_kv_cache_specs(
        self, block_size: int, dtype: torch.dtype
    ) -> dict[str, FullAttentionSpec]:
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

    def write_context(  # noqa: B027 - not every speculator remembers anything
        self, batch: InputBatch, taps: list[torch.Tensor]
    ) -> None:
        """Keep the drafter's cache complete in a step that it does not draft after.

        The request rows are already advanced by what the step has sampled.

        Args:
            batch: of the step.
            taps: as for `propose`; they may be kept for a later step.
        """

    def catch_up(self) -> None:  # noqa: B027 - most put nothing off
        """Do now what was put off until the next proposal."""

    def observe_acceptance(
        self, batch: InputBatch, sampler_output: SamplerOutput
    ) -> None:
        """Learn which of the step's drafts were accepted.

        To be called after a step that had drafts, before the next ones are proposed.

        Args:
            batch: of the step.
            sampler_output: of the step.
        """
        self._confidence.observe(
            batch.layout, batch.idx_mapping, sampler_output.num_sampled
        )

    def forget_acceptance(self) -> None:
        """Forget what was learnt, such as from steps that were nobody's."""
        self._confidence.forget()

    @abstractmethod
    def propose(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        hidden_states: torch.Tensor,
        taps: list[torch.Tensor],
        max_drafts: int,
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
            max_drafts: for each request, 1 .. num_speculative_tokens. It must not
                depend on the confidences of drafts that are not verified yet.

        Returns:
            None if the host knows that no request of the batch gets a draft.
        """

    def _complete(
        self, batch: InputBatch, rows: torch.Tensor | None, drafted: ScoredDrafts
    ) -> Drafts:
        """Return the proposal of a step in which these requests of the batch drafted.

        Args:
            batch: of the step.
            rows: [num_rows] int64, batch_idx of each, ascending; None for all.
            drafted: in the same order.
        """
        drafted = drafted.widened(self._num_speculative_tokens)
        if rows is None or len(rows) == batch.num_reqs:
            confidence_probs = self._confidence.estimate(
                drafted.scores, batch.idx_mapping, drafted.num_drafts
            )
            return Drafts(drafted.token_ids, drafted.num_drafts, confidence_probs)
        shape = batch.num_reqs, self._num_speculative_tokens
        token_ids = drafted.token_ids.new_full(shape, -1)
        num_drafts = drafted.num_drafts.new_zeros(batch.num_reqs)
        scores = drafted.scores.new_zeros(shape)
        token_ids[rows], num_drafts[rows] = drafted.token_ids, drafted.num_drafts
        scores[rows] = drafted.scores
        confidence_probs = self._confidence.estimate(
            scores, batch.idx_mapping, num_drafts
        )
        return Drafts(token_ids, num_drafts, confidence_probs)


def find_drafting_rows(batch: InputBatch, req_states: RequestState) -> np.ndarray:
    """Return the batch rows that have sampled and may have drafts, as the host knows.

    Args:
        batch: of the step.
        req_states: the requests' own limits.
    """
    allows_drafts_np = req_states.max_num_drafts_np[batch.idx_mapping_np] > 0
    [rows_np] = (batch.layout.is_sampling_np & allows_drafts_np).nonzero()
    return rows_np
