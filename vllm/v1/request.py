"""One sequence in the engine core: its tokens, its progress and its status."""

import enum
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreRequest
    from vllm.v1.structured_output.request import StructuredOutputRequest

BlockHasher = Callable[["Request"], list[bytes]]


class RequestStatus(enum.IntEnum):
    """Where a request is in its life; the finished ones come last."""

    WAITING = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether no step will follow."""
        return self > RequestStatus.PREEMPTED


class Request:
    """One sequence that the scheduler knows.

    `all_token_ids` is always the prompt followed by the output, and `block_hashes` has
    one entry for each of its full blocks (none without a hasher).

    Args:
        arrival_time: seconds of `time.time()`.
        priority: lower runs earlier, under the priority policy.
        cache_salt: separates prefix caches of callers that must not share.
        parent_request_id: the same for all children of an n > 1 request.
        block_hasher: returns the hashes of the full blocks that have none yet.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        parent_request_id: str | None = None,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.parent_request_id = parent_request_id

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        # Set by the structured output manager when the compilation begins.
        self.structured_output_request: StructuredOutputRequest | None = None

        self.num_prompt_tokens = len(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.all_token_ids = list(prompt_token_ids)
        self.spec_token_ids: list[int] = []
        # Tokens whose KV is written, those of the step in flight included.
        self.num_computed_tokens = 0
        # Prompt tokens found in the prefix cache when first scheduled; -1 before.
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        # The order in which the scheduler took the requests.
        self.arrival_index = 0
        max_tokens = sampling_params.max_tokens
        # Prompt and output together; the scheduler caps it at the model's length.
        self.max_total_tokens = (
            sys.maxsize if max_tokens is None else self.num_prompt_tokens + max_tokens
        )

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        self._update_block_hashes()

    @classmethod
    def from_engine_core_request(
        cls, request: "EngineCoreRequest", block_hasher: BlockHasher | None
    ) -> "Request":
        """Make the scheduler's view of a message."""
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            parent_request_id=request.parent_request_id,
            block_hasher=block_hasher,
        )

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Committed tokens and the drafts behind them."""
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether no step will follow."""
        return self.status.is_finished

    def append_output_token_ids(self, token_ids: Iterable[int]) -> None:
        """Commit sampled tokens."""
        for token_id in token_ids:
            self.output_token_ids.append(token_id)
            self.all_token_ids.append(token_id)
        self._update_block_hashes()

    def take_events(self) -> "list[EngineCoreEvent] | None":
        """Return the marks since the last call, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def _update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))
