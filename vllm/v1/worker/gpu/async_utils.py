"""The one place that waits for the device: results on their way to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.v1.outputs import (
    DraftTokenIds,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.spec_decode.metrics import StepCost
from vllm.v1.worker.gpu.batch_layout import BatchLayout


@dataclass(frozen=True)
class VerificationRecord:
    """What is told of the verification of a step beside its samples.

    Args:
        layout: of the step.
        admitted: [num_reqs] int32, on the device, how many drafts of each request are
            verified; nobody writes to it.
        draft_confidences: [num_reqs, num_speculative_tokens] float32, on the device, in
            a tensor of their own; None: nobody predicts.
        step_cost: of an earlier step, if it has become known.
    """

    layout: BatchLayout
    admitted: torch.Tensor
    draft_confidences: torch.Tensor | None = None
    step_cost: StepCost | None = None


def make_copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Return a stream for copies to the host; None on a CPU, where they are views."""
    return torch.cuda.Stream() if device.type == "cuda" else None


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has nothing left to do; not for steps of requests."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class AsyncOutput:
    """Starts the copies of a step's results, and waits for them when asked.

    Args:
        req_ids: the requests of the step, in batch order.
        sampler_output: on the device.
        prompt_logprobs: finished prompts' log-probabilities, on the device.
        verification: of the step.
        copy_stream: for the copies; None on a CPU, where a copy is a view.
    """

    def __init__(
        self,
        req_ids: list[str],
        sampler_output: SamplerOutput,
        prompt_logprobs: dict[str, LogprobsTensors],
        verification: VerificationRecord,
        copy_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self._req_ids = req_ids
        self._verification = verification
        # The device tensors must outlive the copies that read them.
        self._sampler_output = sampler_output
        self._prompt_logprobs = prompt_logprobs
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._start_copies(lambda values: values)
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._start_copies(lambda values: values.to("cpu", non_blocking=True))
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(copy_stream)

    def _start_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        output, verification = self._sampler_output, self._verification
        self._sampled = copy(output.sampled_token_ids)
        self._num_sampled = copy(output.num_sampled)
        self._num_nans = None if output.num_nans is None else copy(output.num_nans)
        self._num_verified = (
            None
            if verification.layout.is_exact_on_host
            else copy(verification.admitted)
        )
        confidences = verification.draft_confidences
        self._confidences = None if confidences is None else copy(confidences)
        self._logprobs = (
            None
            if output.logprobs_tensors is None
            else output.logprobs_tensors.to_cpu_nonblocking()
        )
        self._host_prompt_logprobs = {
            req_id: tensors.to_cpu_nonblocking()
            for req_id, tensors in self._prompt_logprobs.items()
        }

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies and return the step's result."""
        if self._event is not None:
            self._event.synchronize()
        num_sampled = self._num_sampled.tolist()
        sampled = [
            row[:count]
            for row, count in zip(self._sampled.tolist(), num_sampled, strict=True)
        ]
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(self._req_ids)},
            sampled_token_ids=sampled,
            logprobs=None if self._logprobs is None else self._logprobs.tolists(),
            prompt_logprobs_dict={
                req_id: tensors.tolists()
                for req_id, tensors in self._host_prompt_logprobs.items()
            },
            num_nans_in_logits=self._count_nans(),
            num_verified_drafts=self._count_verified_drafts(),
            draft_confidences=(
                None if self._confidences is None else self._confidences.tolist()
            ),
            step_cost=self._verification.step_cost,
        )

    def _count_nans(self) -> dict[str, int]:
        """Return the counts of the requests that have any."""
        if self._num_nans is None:
            return {}
        counts = zip(self._req_ids, self._num_nans.tolist(), strict=True)
        return {req_id: num_nans for req_id, num_nans in counts if num_nans}

    def _count_verified_drafts(self) -> dict[str, int]:
        """Return the counts of the requests that have a draft trimmed."""
        layout = self._verification.layout
        num_drafts = layout.num_draft_tokens_per_req
        if num_drafts is None or layout.num_trimmed_drafts == 0:
            return {}
        num_verified = [0] * layout.num_reqs
        if self._num_verified is not None:
            num_verified = self._num_verified.tolist()
        counts = zip(self._req_ids, num_verified, num_drafts.tolist(), strict=True)
        return {req_id: kept for req_id, kept, drafted in counts if kept < drafted}


class AsyncDrafts:
    """A step's drafts on their way to the host, where masks are made for them.

    Args:
        req_ids: the requests of the step, in batch order.
        token_ids: [num_reqs, num_speculative_tokens] int64, on the device.
        num_drafts: [num_reqs] int32, on the device.
        copy_stream: for the copies; None on a CPU, where a copy is a view.
    """

    def __init__(
        self,
        req_ids: list[str],
        token_ids: torch.Tensor,
        num_drafts: torch.Tensor,
        copy_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        self._req_ids = req_ids
        # The device tensors must outlive the copies that read them.
        self._sources = (token_ids, num_drafts)
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._token_ids, self._num_drafts = self._sources
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._token_ids = token_ids.to("cpu", non_blocking=True)
            self._num_drafts = num_drafts.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(copy_stream)

    def get_output(self) -> DraftTokenIds:
        """Wait for the copies and return the drafts."""
        if self._event is not None:
            self._event.synchronize()
        counts = self._num_drafts.tolist()
        rows = self._token_ids.tolist()
        return DraftTokenIds(
            self._req_ids,
            [row[:count] for row, count in zip(rows, counts, strict=True)],
        )
