"""What the worker hands back: sampled tokens and their log-probabilities."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Under this name too: a module of messages offers both forms of one thing.
from vllm.v1.logprobs_lists import LogprobsLists as LogprobsLists
from vllm.v1.spec_decode.metrics import StepCost


class LogprobsTensors(NamedTuple):
    """Log-probabilities where the model runs, one row a logit row.

    The row boundaries are known on the host or on the device, never both. They are two
    fields because a msgspec decoder cannot take a union of a custom type with anything
    but None.

    Args:
        logprob_token_ids: [N, 1 + n] int32 or int64; column 0 is the sampled token.
        logprobs: [N, 1 + n] float32.
        selected_token_ranks: [N] int32 or int64; 1 = most likely.
        cu_num_generated_tokens: [R + 1] boundaries, on the host.
        cu_num_generated_tokens_tensor: [R + 1] boundaries, on the device.
    """

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: torch.Tensor | None = None

    def tolists(
        self, cu_num_generated_tokens: list[int] | None = None
    ) -> LogprobsLists:
        """Turn host tensors into arrays; call it after the copy has finished.

        Args:
            cu_num_generated_tokens: boundaries that win over both fields.
        """
        boundaries = cu_num_generated_tokens
        if boundaries is None and self.cu_num_generated_tokens_tensor is not None:
            boundaries = self.cu_num_generated_tokens_tensor.tolist()
        if boundaries is None:
            boundaries = self.cu_num_generated_tokens
        return LogprobsLists(
            self.logprob_token_ids.numpy(),
            self.logprobs.numpy(),
            self.selected_token_ranks.numpy(),
            boundaries,
        )

    def to_cpu_nonblocking(self) -> "LogprobsTensors":
        """Start the copy of every tensor to the host on the current stream."""
        if self.logprobs.device.type == "cpu":
            return self
        boundaries = self.cu_num_generated_tokens_tensor
        if boundaries is not None:
            boundaries = boundaries.to("cpu", non_blocking=True)
        return LogprobsTensors(
            self.logprob_token_ids.to("cpu", non_blocking=True),
            self.logprobs.to("cpu", non_blocking=True),
            self.selected_token_ranks.to("cpu", non_blocking=True),
            self.cu_num_generated_tokens,
            boundaries,
        )

    def filter(self, mask: torch.Tensor) -> "LogprobsTensors":
        """Return the rows where `mask` [N] bool is set; it has no boundaries."""
        assert self.cu_num_generated_tokens is None, "filter drops row boundaries"
        assert self.cu_num_generated_tokens_tensor is None, (
            "filter drops device row boundaries"
        )
        return LogprobsTensors(
            self.logprob_token_ids[mask],
            self.logprobs[mask],
            self.selected_token_ranks[mask],
        )

    @staticmethod
    def cat(
        tensors: list["LogprobsTensors"],
        cu_num_generated_tokens: list[int] | None = None,
    ) -> "LogprobsTensors":
        """Join row blocks; one block keeps its boundaries unless new ones are given."""
        assert tensors, "nothing to join"
        if len(tensors) == 1:
            if cu_num_generated_tokens is None:
                return tensors[0]
            return tensors[0]._replace(
                cu_num_generated_tokens=cu_num_generated_tokens,
                cu_num_generated_tokens_tensor=None,
            )
        for part in tensors:
            assert part.cu_num_generated_tokens_tensor is None, (
                "device row boundaries cannot be joined"
            )
            assert (
                cu_num_generated_tokens is not None
                or part.cu_num_generated_tokens is None
            ), "joined rows need new boundaries"
        return LogprobsTensors(
            torch.cat([part.logprob_token_ids for part in tensors]),
            torch.cat([part.logprobs for part in tensors]),
            torch.cat([part.selected_token_ranks for part in tensors]),
            cu_num_generated_tokens,
        )

    @staticmethod
    def empty_cpu(
        num_positions: int, num_tokens_per_position: int
    ) -> "LogprobsTensors":
        """Return uninitialised host tensors of the given shape."""
        pin = torch.cuda.is_available()
        shape = (num_positions, num_tokens_per_position)
        return LogprobsTensors(
            torch.empty(shape, dtype=torch.int32, pin_memory=pin),
            torch.empty(shape, dtype=torch.float32, pin_memory=pin),
            torch.empty(num_positions, dtype=torch.int32, pin_memory=pin),
        )


@dataclass
class SamplerOutput:
    """One step's samples, still on the device.

    Args:
        sampled_token_ids: [R, K + 1] int64; undefined past `num_sampled`.
        num_sampled: [R] int32; 0 for a prefill chunk that samples nothing.
        logprobs_tensors: rows of the step's layout, or None.
        num_nans: [R] int32 count of NaN logits in each request's rows, or None.
    """

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    logprobs_tensors: LogprobsTensors | None = None
    num_nans: torch.Tensor | None = None


@dataclass
class ModelRunnerOutput:
    """One step's result, on the host, in the batch order of the worker.

    Args:
        req_ids: the requests of the step.
        req_id_to_index: their places in the lists below.
        sampled_token_ids: the new tokens of each request; empty for a prefill chunk.
        logprobs: of the new tokens, or None if no request asked.
        prompt_logprobs_dict: finished prompts' log-probabilities, rows 1..P-1.
        num_nans_in_logits: requests whose logits held NaN, with the count.
        num_verified_drafts: requests of which fewer drafts were verified than were
            scheduled, with the count.
        draft_confidences: num_speculative_tokens of each request: the predicted
            probability that a draft of this step is accepted if those before it are;
            NaN where there is none. None: nobody predicts.
        step_cost: of the last step whose time has been predicted and is known; None if
            it was reported before.
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists] = field(default_factory=dict)
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    num_verified_drafts: dict[str, int] = field(default_factory=dict)
    draft_confidences: list[list[float]] | None = None
    step_cost: StepCost | None = None


@dataclass
class DraftTokenIds:
    """What the next step can verify, one list a request.

    Args:
        draft_token_ids: empty for a request that has not sampled.
    """

    req_ids: list[str]
    draft_token_ids: list[list[int]]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput([], {}, [])
