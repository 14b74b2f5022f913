"""One step in the making: who gets how many tokens, which blocks, and who gives way."""

from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class StepLimits:
    """What holds for every step.

    Args:
        max_num_running_reqs: at most `max_num_batched_tokens`, so that each running
            request gets at least one token in each step.
        num_lookahead_tokens: slots behind a request's tokens, for a drafter.
        is_priority_policy: the least important request gives way, not the latest.
    """

    max_num_batched_tokens: int
    max_num_running_reqs: int
    enable_chunked_prefill: bool
    num_lookahead_tokens: int
    is_priority_policy: bool


class StepBuilder:
    """Schedules one step, running requests first; used once.

    Args:
        running: changed in place: requests start, and give way.
        waiting: requests that can start; those that gave way return to it.
        kv_cache_manager: gives the blocks.

    Attributes:
        preempted_req_ids: requests that gave way.
        too_large_requests: requests that not even the whole KV cache can hold; the
            caller ends them.
    """

    def __init__(
        self,
        limits: StepLimits,
        running: list[Request],
        waiting: RequestQueue,
        kv_cache_manager: KVCacheManager,
    ) -> None:
        self.preempted_req_ids: set[str] = set()
        self.too_large_requests: list[Request] = []
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._manager = kv_cache_manager
        self._token_budget = limits.max_num_batched_tokens
        # In scheduling order, drafts included.
        self._num_scheduled_tokens: dict[str, int] = {}
        # Requests that have a row in the worker, with their new blocks.
        self._continued: dict[str, tuple[Request, list[KVCacheBlock]]] = {}
        # Requests that take a row.
        self._started: list[Request] = []

    def schedule(self) -> None:
        """Give tokens and blocks to as many requests as there are for."""
        self._schedule_running()
        # A step that had to take blocks away has none for newcomers.
        if not self.preempted_req_ids:
            self._schedule_waiting()

    def build(self, finished_req_ids: set[str]) -> SchedulerOutput:
        """Return the message to the worker; the requests' drafts go into it.

        Args:
            finished_req_ids: rows to free.
        """
        cached = CachedRequestData()
        drafts: dict[str, list[int]] = {}
        for request_id, (request, new_blocks) in self._continued.items():
            cached.req_ids.append(request_id)
            cached.new_block_ids.append(
                self._manager.to_block_ids(new_blocks) if new_blocks else None
            )
            cached.num_computed_tokens.append(request.num_computed_tokens)
            if request.spec_token_ids:
                num_known = request.num_tokens - request.num_computed_tokens
                num_drafts = self._num_scheduled_tokens[request_id] - num_known
                if num_drafts > 0:
                    drafts[request_id] = request.spec_token_ids[:num_drafts]
                # A draft is verified in the next step or never.
                request.spec_token_ids = []
        return SchedulerOutput(
            scheduled_new_reqs=[self._make_new_data(req) for req in self._started],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self._num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self._num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
        )

    def _schedule_running(self) -> None:
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING:
                # It gave way to one before it.
                continue
            # Drafts and chunks leave a token for each of those behind them.
            num_later = len(self._running) - len(self._num_scheduled_tokens) - 1
            num_new_tokens = min(
                request.num_tokens
                - request.num_computed_tokens
                + _num_useful_drafts(request),
                self._token_budget - num_later,
            )
            assert num_new_tokens > 0, f"{request.request_id} has nothing to compute"
            new_blocks = self._allocate_or_preempt(request, num_new_tokens)
            if new_blocks is not None:
                self._continued[request.request_id] = (request, new_blocks)
                self._take_tokens(request, num_new_tokens)

    def _schedule_waiting(self) -> None:
        while (
            self._waiting
            and self._token_budget > 0
            and len(self._running) < self._limits.max_num_running_reqs
        ):
            request = self._waiting.peek()
            computed_blocks, num_computed = self._manager.get_computed_blocks(request)
            num_new_tokens = request.num_tokens - num_computed
            if num_new_tokens > self._token_budget:
                if not self._may_be_chunked(num_new_tokens):
                    break
                num_new_tokens = self._token_budget
            new_blocks = None
            # With room for its first chunk only, it would soon take it from others.
            if self._manager.can_hold_all_tokens(request, computed_blocks):
                new_blocks = self._manager.allocate_slots(
                    request,
                    num_new_tokens,
                    num_computed,
                    computed_blocks,
                    self._limits.num_lookahead_tokens,
                )
            if new_blocks is None and self._running:
                break
            self._waiting.pop()
            if new_blocks is None:
                self.too_large_requests.append(request)
                continue
            self._start(request, num_computed)
            self._take_tokens(request, num_new_tokens)

    def _take_tokens(self, request: Request, num_tokens: int) -> None:
        self._num_scheduled_tokens[request.request_id] = num_tokens
        self._token_budget -= num_tokens

    def _may_be_chunked(self, num_new_tokens: int) -> bool:
        # Output that is computed again after preemption may exceed what was a prompt's
        # limit; without chunks such a request could never come back.
        return (
            self._limits.enable_chunked_prefill
            or num_new_tokens > self._limits.max_num_batched_tokens
        )

    def _start(self, request: Request, num_computed_tokens: int) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
            if request.sampling_params.prompt_logprobs is None:
                self._manager.record_lookup(request.num_tokens, num_computed_tokens)
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        request.events.append(EngineCoreEvent.now(EngineCoreEventType.SCHEDULED))
        self._running.append(request)
        self._started.append(request)

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int
    ) -> list[KVCacheBlock] | None:
        """Get a running request its blocks, from others if need be.

        Returns:
            The new blocks; None if the request itself had to give way, or is too large.
        """
        while True:
            new_blocks = self._manager.allocate_slots(
                request,
                num_new_tokens,
                num_lookahead_tokens=self._limits.num_lookahead_tokens,
            )
            if new_blocks is not None:
                return new_blocks
            if len(self._running) == 1:
                self.too_large_requests.append(request)
                return None
            victim = self._running[-1]
            if self._limits.is_priority_policy:
                victim = max(self._running, key=self._waiting.sort_key)
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it will be computed again."""
        request_id = request.request_id
        self._running.remove(request)
        self._token_budget += self._num_scheduled_tokens.pop(request_id, 0)
        self._continued.pop(request_id, None)
        self.preempted_req_ids.add(request_id)
        self._manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        # They belong to a row that is gone.
        request.spec_token_ids = []
        request.num_preemptions += 1
        request.events.append(EngineCoreEvent.now(EngineCoreEventType.PREEMPTED))
        self._waiting.add(request)

    def _make_new_data(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=list(request.all_token_ids),
            sampling_params=request.sampling_params,
            block_ids=self._manager.get_block_ids(request.request_id),
            num_computed_tokens=request.num_computed_tokens,
        )


def _num_useful_drafts(request: Request) -> int:
    """Drafts that can be committed with one more token behind them."""
    if not request.spec_token_ids:
        return 0
    max_drafts = request.max_total_tokens - request.num_tokens - 1
    return max(min(len(request.spec_token_ids), max_drafts), 0)
