"""Log-probabilities of prompt tokens, collected while the prompt is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

# Of the float32 logits that exist at a time.
MAX_CHUNK_BYTES = 64 * 2**20

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Collected:
    """One prompt's rows: row i is of prompt token i + 1.

    Args:
        prompt_token_ids: [num_prompt_tokens] int64.
        num_logprobs: candidates beside the prompt's own token.
        num_rows: rows that are filled, from the first on.
        rows: [num_prompt_tokens - 1] rows, on the device; None before the first chunk.
    """

    prompt_token_ids: torch.Tensor
    num_logprobs: int
    num_rows: int = 0
    rows: LogprobsTensors | None = None


class PromptLogprobs:
    """The prompts whose log-probabilities were asked for, by state row.

    No sampling parameter works on a prompt, so the processed modes say what the raw
    ones say. A request that comes back after a preemption computes its prompt from the
    start: its rows are collected again, unless they have been handed out before.

    Args:
        max_num_reqs: rows.
        vocab_size: width of the logits.
        device: where the model runs.
        logprobs_mode: one of vllm.config.model.LOGPROBS_MODES.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.is_used_np = np.zeros(max_num_reqs, dtype=bool)
        self._collected: dict[int, _Collected] = {}
        self._vocab_size = vocab_size
        self._device = device
        self._logits_mode = logprobs_mode.endswith("_logits")
        self._max_chunk_rows = max(1, MAX_CHUNK_BYTES // (4 * vocab_size))

    def add_request(
        self,
        req_state_idx: int,
        req_id: str,
        sampling_params: SamplingParams,
        prompt_token_ids: list[int],
        prefill_token_ids: list[int] | None = None,
    ) -> None:
        """Fill the request's row.

        Args:
            prefill_token_ids: every token known so far; beyond the prompt if the
                request was preempted after its prompt was complete.
        """
        self.remove_request(req_state_idx)
        num_logprobs = sampling_params.prompt_logprobs
        is_handed_out = prefill_token_ids is not None and len(prefill_token_ids) > len(
            prompt_token_ids
        )
        if num_logprobs is None or is_handed_out:
            return
        self.is_used_np[req_state_idx] = True
        self._collected[req_state_idx] = _Collected(
            to_device(np.asarray(prompt_token_ids, dtype=np.int64), self._device),
            self._vocab_size if num_logprobs < 0 else num_logprobs,
        )

    def remove_request(self, req_state_idx: int) -> None:
        """Empty the request's row."""
        self.is_used_np[req_state_idx] = False
        self._collected.pop(req_state_idx, None)

    def collect(
        self,
        batch: InputBatch,
        hidden_states: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> dict[str, LogprobsTensors]:
        """Take the step's rows of prompts, and return the prompts that are complete.

        Args:
            batch: of the step.
            hidden_states: [num_tokens, hidden_size] of the step's tokens.
            compute_logits: hidden states [n, hidden_size] -> logits [n, vocab_size].

        Returns:
            Rows of the prompt tokens 1 .. P - 1, by request id.
        """
        if not self._collected:
            return {}
        collecting = np.flatnonzero(self.is_used_np[batch.idx_mapping_np])
        if collecting.size == 0:
            return {}
        num_scheduled = batch.layout.num_scheduled_tokens_np
        # Trimmed drafts stand before the prefills, so that from the end the host knows
        # exactly where a prompt's tokens are.
        num_from_the_end = np.cumsum(num_scheduled[::-1])[::-1]
        finished: dict[str, LogprobsTensors] = {}
        for batch_idx in collecting.tolist():
            req_state_idx = int(batch.idx_mapping_np[batch_idx])
            token_idx = batch.layout.num_tokens - int(num_from_the_end[batch_idx])
            position = batch.num_computed_tokens[batch_idx]
            end = position + int(num_scheduled[batch_idx])
            collected = self._collected[req_state_idx]
            prompt_len = len(collected.prompt_token_ids)
            num_rows = min(end, prompt_len - 1) - position
            self._collect_rows(
                collected,
                position,
                hidden_states[token_idx : token_idx + max(num_rows, 0)],
                compute_logits,
            )
            if end >= prompt_len:
                finished[batch.req_ids[batch_idx]] = self._finish(req_state_idx)
        return finished

    def _collect_rows(
        self,
        collected: _Collected,
        position: int,
        hidden_states: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> None:
        assert position <= collected.num_rows, (
            f"the prompt's rows {collected.num_rows} to {position} were not computed"
        )
        for first in range(0, len(hidden_states), self._max_chunk_rows):
            chunk = hidden_states[first : first + self._max_chunk_rows]
            start = position + first
            end = start + len(chunk)
            scores = compute_topk_scores(
                compute_logits(chunk).to(torch.float32),
                collected.num_logprobs,
                collected.prompt_token_ids[start + 1 : end + 1],
                logits_mode=self._logits_mode,
            )
            rows = self._rows(collected)
            rows.logprob_token_ids[start:end] = scores.logprob_token_ids
            rows.logprobs[start:end] = scores.logprobs
            rows.selected_token_ranks[start:end] = scores.selected_token_ranks
            collected.num_rows = max(collected.num_rows, end)

    def _rows(self, collected: _Collected) -> LogprobsTensors:
        if collected.rows is None:
            num_rows = len(collected.prompt_token_ids) - 1
            shape = (num_rows, 1 + min(collected.num_logprobs, self._vocab_size))
            device = self._device
            collected.rows = LogprobsTensors(
                torch.empty(shape, dtype=torch.int32, device=device),
                torch.empty(shape, dtype=torch.float32, device=device),
                torch.empty(num_rows, dtype=torch.int32, device=device),
            )
        return collected.rows

    def _finish(self, req_state_idx: int) -> LogprobsTensors:
        collected = self._collected[req_state_idx]
        rows = self._rows(collected)
        self.remove_request(req_state_idx)
        return rows
