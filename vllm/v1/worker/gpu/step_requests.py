"""Who is in a step, in batch order: read from the scheduler's messages."""

from dataclasses import dataclass
from operator import add, ge

import numpy as np
import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.batch_layout import ScheduledStep
from vllm.v1.worker.gpu.buffer_utils import to_device
from vllm.v1.worker.gpu.states import RequestState


@dataclass(frozen=True)
class StepRequests:
    """The requests of a step, but for how far each of them has come.

    Args:
        req_ids: batch_idx -> request.
        idx_mapping: [num_reqs] int32, batch_idx -> req_state_idx, on the device.
        max_drafts_np: [num_reqs] int32, drafts that the requests may have.
        num_tokens: of each, drafts included.
        scheduled: what the scheduler gave them.
    """

    req_ids: list[str]
    idx_mapping: torch.Tensor
    max_drafts_np: np.ndarray
    num_tokens: list[int]
    scheduled: ScheduledStep


class StepReader:
    """Turns messages into requests; while they say the same, into the very same ones.

    Most steps decode the same requests as the last one, and whatever was made for it
    stands.

    Args:
        states: rows of the requests.
        num_bonus_tokens: logit rows of a sampling request beside its drafts.
        device: of the rows.
    """

    def __init__(
        self, states: RequestState, num_bonus_tokens: int, device: torch.device
    ) -> None:
        self._states = states
        self._num_bonus_tokens = num_bonus_tokens
        self._device = device
        # All that the last requests were made from: who has which row, and how many
        # tokens and drafts each got, and whether it samples; in the message's order.
        self._rows: tuple[int, list[str]] = (-1, [])
        self._counts: tuple[list[int], list[int], list[bool]] = ([], [], [])
        self._prefill_lens: list[int] = []
        # batch_idx -> place in the message.
        self._order: list[int] = []
        self._requests: StepRequests | None = None

    def read(self, message: SchedulerOutput) -> tuple[StepRequests, list[int]]:
        """Return the requests of a step, and the tokens computed before it of each.

        The number is an upper bound under speculation.
        """
        cached, new_reqs = message.scheduled_cached_reqs, message.scheduled_new_reqs
        req_ids, num_computed = cached.req_ids, cached.num_computed_tokens
        if new_reqs:
            req_ids = req_ids + [request.req_id for request in new_reqs]
            num_computed = num_computed + [
                request.num_computed_tokens for request in new_reqs
            ]
        rows = self._states.version, req_ids
        if rows != self._rows:
            self._rows, self._requests = rows, None
            row_of, lens = self._states.req_id_to_index, self._states.prefill_len.np
            self._prefill_lens = [int(lens[row_of[req_id]]) for req_id in req_ids]
        tokens, drafts = (
            message.num_scheduled_tokens,
            message.scheduled_spec_decode_tokens,
        )
        num_tokens = [tokens[req_id] for req_id in req_ids]
        num_drafts = [len(drafts.get(req_id, ())) for req_id in req_ids]
        # A chunk that ends before the last known token samples nothing.
        ends = map(add, num_computed, num_tokens)
        counts = num_tokens, num_drafts, list(map(ge, ends, self._prefill_lens))
        if self._requests is None or counts != self._counts:
            self._requests = self._make_requests(req_ids, *counts)
            self._counts = counts
        return self._requests, [num_computed[place] for place in self._order]

    def _make_requests(
        self,
        req_ids: list[str],
        num_tokens: list[int],
        num_drafts: list[int],
        is_sampling: list[bool],
    ) -> StepRequests:
        # Verification rows first, then decodes, then prefills.
        self._order = order = sorted(
            range(len(req_ids)),
            key=lambda place: (num_drafts[place] == 0, num_tokens[place]),
        )
        req_ids = [req_ids[place] for place in order]
        row_of = self._states.req_id_to_index
        idx_mapping_np = np.array([row_of[req_id] for req_id in req_ids], np.int32)
        num_tokens = [num_tokens[place] for place in order]
        scheduled = ScheduledStep(
            idx_mapping_np,
            np.array(num_tokens, np.int32),
            np.array([num_drafts[place] for place in order], np.int32),
            np.array([is_sampling[place] for place in order], np.bool_),
            self._num_bonus_tokens,
        )
        return StepRequests(
            req_ids,
            to_device(idx_mapping_np, self._device),
            self._states.max_num_drafts_np[idx_mapping_np],
            num_tokens,
            scheduled,
        )
