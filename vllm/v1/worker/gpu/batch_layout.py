"""Which logit rows exist: what was scheduled, and what the device verifies.

Sums over requests are Python's own: of a few numbers they cost a third of NumPy's, the
code of which the layers have driven out of the caches since the last step.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


class InexactLayoutError(RuntimeError):
    """Host offsets were asked for in a step whose split only the device knows."""


@dataclass(frozen=True)
class ScheduledStep:
    """What the scheduler gave a step, in batch order, on the host.

    Args:
        idx_mapping_np: [num_reqs] int32, batch_idx -> req_state_idx.
        num_tokens_np: [num_reqs] int32, drafts included.
        num_drafts_np: [num_reqs] int32.
        is_sampling_np: [num_reqs] bool; a chunk that ends before the last known token
            samples nothing, and has no drafts.
        num_bonus_tokens: logit rows of a sampling request beside its drafts.
    """

    idx_mapping_np: np.ndarray
    num_tokens_np: np.ndarray
    num_drafts_np: np.ndarray
    is_sampling_np: np.ndarray
    num_bonus_tokens: int

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.num_tokens_np)

    @cached_property
    def num_sampling_reqs(self) -> int:
        """Requests that get a token, whatever becomes of their drafts."""
        return sum(self.is_sampling_np.tolist())

    @cached_property
    def num_drafts(self) -> int:
        """Scheduled drafts."""
        return sum(self.num_drafts_np.tolist())

    @cached_property
    def num_non_draft_tokens(self) -> int:
        """Tokens that the target computes also if no draft is verified."""
        return sum(self.num_tokens_np.tolist()) - self.num_drafts

    @cached_property
    def num_bonus_rows_np(self) -> np.ndarray:
        """[num_reqs] int32: logit rows beside the drafts'."""
        return self.is_sampling_np * np.int32(self.num_bonus_tokens)

    @cached_property
    def num_draft_reqs(self) -> int:
        """Requests with scheduled drafts."""
        return sum(map(bool, self.num_drafts_np.tolist()))

    def settle(self, draft_budget: int) -> np.ndarray | None:
        """Return [num_reqs] int32, the drafts of each that a budget alone admits.

        It does where none or all are verified, or where one request has them all: what
        is admitted are leading drafts. None: only the device knows.
        """
        if self.num_draft_reqs > 1 and draft_budget not in (0, self.num_drafts):
            return None
        return np.minimum(self.num_drafts_np, np.int32(draft_budget))

    @cached_property
    def settled_admissions(self) -> dict[int, torch.Tensor]:
        """What `settle` returned, on the device, by draft budget; filled when asked."""
        return {}

    @cached_property
    def settled_layouts(self) -> "dict[int, BatchLayout]":
        """The layouts of the same budgets; filled when asked."""
        return {}


@dataclass(frozen=True)
class BatchLayout:
    """The two row layouts of one step (never one field for both).

    The *scheduled* layout is known to the host when the step is scheduled: a request
    that samples owns its scheduled drafts + bonus rows, any other owns none. It bounds
    every buffer and grid. The *verified* layout is device truth: a request owns the
    drafts that were admitted + bonus rows. The host knows the verified totals exactly,
    and the split only if all drafts or none of them were admitted.

    Args:
        cu_num_logits_np: [num_reqs + 1] int32, scheduled, host.
        cu_num_logits: [num_reqs + 1] int32, verified, device.
        query_start_loc: [num_reqs + 1] int32, verified tokens, device.
        num_scheduled_tokens_np: [num_reqs] int32, drafts included, host.
        num_draft_tokens_per_req: [num_reqs] int32, scheduled drafts; None: no drafts.
        num_bonus_tokens: rows of a sampling request beside its drafts.
        draft_budget: drafts that are verified in this step, over all requests.
    """

    cu_num_logits_np: np.ndarray
    cu_num_logits: torch.Tensor
    query_start_loc: torch.Tensor
    num_scheduled_tokens_np: np.ndarray
    num_draft_tokens_per_req: np.ndarray | None
    num_bonus_tokens: int
    draft_budget: int

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.num_scheduled_tokens_np)

    @cached_property
    def max_query_len(self) -> int:
        """Upper bound of the tokens of a request."""
        return max(self.num_scheduled_tokens_np.tolist())

    @cached_property
    def is_sampling_np(self) -> np.ndarray:
        """[num_reqs] bool: who owns a row, in either layout."""
        # Comparing takes a third of the time of `np.diff`.
        return self.cu_num_logits_np[1:] > self.cu_num_logits_np[:-1]

    @cached_property
    def num_scheduled_drafts(self) -> int:
        """Drafts that the scheduler gave the step."""
        if self.num_draft_tokens_per_req is None:
            return 0
        return sum(self.num_draft_tokens_per_req.tolist())

    @cached_property
    def num_trimmed_drafts(self) -> int:
        """Scheduled drafts that are not verified."""
        return self.num_scheduled_drafts - self.draft_budget

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that the target computes, exactly."""
        return sum(self.num_scheduled_tokens_np.tolist()) - self.num_trimmed_drafts

    @cached_property
    def num_logits(self) -> int:
        """Logit rows that exist, exactly."""
        return self.max_num_logits - self.num_trimmed_drafts

    @cached_property
    def max_num_logits(self) -> int:
        """Rows of the scheduled layout: the bound of buffers and grids."""
        return int(self.cu_num_logits_np[-1])

    @cached_property
    def is_exact_on_host(self) -> bool:
        """Whether the host knows the verified split."""
        return self.draft_budget in (0, self.num_scheduled_drafts)

    @cached_property
    def has_one_row_per_req(self) -> bool:
        """Whether row i is request i's only row."""
        return (
            self.num_logits == self.num_reqs
            and self.is_exact_on_host
            and self.verified_cu_num_logits_np.tolist() == [*range(self.num_reqs + 1)]
        )

    @cached_property
    def verified_cu_num_logits_np(self) -> np.ndarray:
        """[num_reqs + 1] int32: the verified layout, on the host.

        Raises:
            InexactLayoutError: only the device knows it in this step.
        """
        if not self.is_exact_on_host:
            raise InexactLayoutError(
                f"{self.draft_budget} of {self.num_scheduled_drafts} drafts are "
                "verified: the split is device truth, use cu_num_logits"
            )
        if self.num_trimmed_drafts == 0:
            return self.cu_num_logits_np
        return prefix_sum(self.is_sampling_np * np.int32(self.num_bonus_tokens))


def prefix_sum(counts: np.ndarray) -> np.ndarray:
    """Return [n + 1] int32 prefix sums of [n] counts, starting at 0."""
    sums = itertools.accumulate(counts.tolist(), initial=0)
    return np.array(list(sums), dtype=np.int32)


def find_owners(ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Say for each row whose it is.

    `repeat_interleave` says the same, but on a CPU it waits for every thread of torch's
    pool, however few the rows: milliseconds when another process has a core.

    Args:
        ends: [n] int32 or int64, where the rows of each of n owners end; who has none
            ends where the one before does.
        num_rows: ends[-1], known to the host.

    Returns:
        [num_rows] int64, indices of owners, in order.
    """
    rows = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True)
