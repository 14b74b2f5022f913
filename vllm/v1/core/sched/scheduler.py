"""The scheduler: who runs in a step, with how many tokens and in which blocks."""

import itertools
import time
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.draft_ledger import DraftLedger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.step_builder import StepBuilder, StepLimits
from vllm.v1.core.sched.stop import (
    FINISH_REASONS,
    Commit,
    GrammarManager,
    decide_commit,
)
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class Scheduler:
    """Continuous batching: running requests first, then waiting ones, in chunks.

    Every step is `schedule`, the worker's run, `update_from_output`, in this order and
    also when nothing is scheduled: ends and errors are reported by it.

    Args:
        structured_output_manager: advances and reads the grammars; it was asked to
            compile a request's grammar before the request comes here.
        log_stats: put statistics on the outputs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: GrammarManager,
        log_stats: bool,
    ) -> None:
        config = vllm_config.scheduler_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_running_reqs=min(
                config.max_num_seqs, config.max_num_batched_tokens
            ),
            enable_chunked_prefill=config.enable_chunked_prefill,
            num_lookahead_tokens=vllm_config.num_lookahead_tokens,
            is_priority_policy=config.policy == "priority",
        )
        self.block_hasher = get_request_block_hasher(vllm_config)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            self.max_model_len,
            vllm_config.cache_config.enable_prefix_caching,
        )
        self._vocab_size = vllm_config.model_config.vocab_size
        self._grammar_manager = structured_output_manager
        self._log_stats = log_stats

        # Every unfinished request is here, and in exactly one of the three below.
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = RequestQueue(config.policy)
        self.waiting_for_grammar: dict[str, Request] = {}

        self._arrival_indices = itertools.count()
        # Rows that the worker does not know to be free yet.
        self._finished_req_ids: set[str] = set()
        # Those of the last step that got a token, which a draft can follow.
        self._sampled_req_ids: set[str] = set()
        # Ends that no step has brought about.
        self._pending_outputs: list[EngineCoreOutput] = []
        # The gauges have changed since they were last reported.
        self._is_report_due = False
        self._num_preempted = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_corrupted_reqs = 0
        self._draft_ledger = DraftLedger(
            vllm_config.num_speculative_tokens,
            vllm_config.observability_config,
            log_stats=log_stats,
        )

    def add_request(self, request: Request) -> None:
        """Let a request wait for its first step.

        Raises:
            VLLMValidationError: no step could ever compute its prompt, or its id is
                that of a request that has not ended.
        """
        self._check_can_run(request)
        request.max_total_tokens = min(request.max_total_tokens, self.max_model_len)
        request.arrival_index = next(self._arrival_indices)
        request.events.append(EngineCoreEvent.now(EngineCoreEventType.QUEUED))
        self.requests[request.request_id] = request
        if request.structured_output_request is None:
            self.waiting.add(request)
        else:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self.waiting_for_grammar[request.request_id] = request

    def finish_requests(
        self, request_ids: str | Iterable[str], status: RequestStatus
    ) -> None:
        """End requests from outside, without an output; unknown ids are ignored."""
        assert status.is_finished, f"{status!r} does not end a request"
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, status)

    def has_requests(self) -> bool:
        """Whether a request has not ended, or an end was not told to everybody."""
        return bool(self.requests) or self._has_ends_to_report()

    def has_runnable_requests(self) -> bool:
        """Whether a step has something to do; not while all wait for a grammar."""
        return (
            bool(self.running or self.waiting)
            or self._has_ends_to_report()
            or any(map(_is_compiled, self.waiting_for_grammar.values()))
        )

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run and how many wait, for whatever reason."""
        num_running = len(self.running)
        return num_running, len(self.requests) - num_running

    def schedule(self) -> SchedulerOutput:
        """Decide on a step; it must then run, because its blocks count as computed."""
        self._release_compiled_requests()
        builder = StepBuilder(
            self.limits, self.running, self.waiting, self.kv_cache_manager
        )
        builder.schedule()
        for request in builder.too_large_requests:
            self._fail_for_size(request)
        self._num_preempted += len(builder.preempted_req_ids)
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        output = builder.build(finished_req_ids)
        self._advance(output)
        return output

    def get_grammar_bitmask(
        self, scheduler_output: SchedulerOutput
    ) -> GrammarOutput | None:
        """Mask the logit rows of the step's constrained requests."""
        request_ids = [
            request_id
            for request_id in scheduler_output.structured_output_request_ids
            if request_id in self.requests
        ]
        if not request_ids:
            return None
        return self._grammar_manager.grammar_bitmask(
            self.requests, request_ids, scheduler_output.scheduled_spec_decode_tokens
        )

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        grammar_output: GrammarOutput | None = None,
    ) -> EngineCoreOutputs:
        """Commit what a step sampled, and end the requests that are complete.

        Args:
            grammar_output: the step's mask, for the count of verified drafts.
        """
        outputs, self._pending_outputs = self._pending_outputs, []
        has_finished = False
        self._sampled_req_ids.clear()
        self._draft_ledger.open_step(
            scheduler_output, model_runner_output, grammar_output
        )
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                # It was aborted while the step ran.
                continue
            num_drafts = len(
                scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            )
            output = self._update_request(request, model_runner_output, num_drafts)
            if output is not None:
                outputs.append(output)
                self._sampled_req_ids.add(request_id)
                has_finished |= output.finished
        if has_finished:
            self.running = [req for req in self.running if not req.is_finished]
        self._draft_ledger.close_step(len(self._sampled_req_ids))
        self._is_report_due = False
        return EngineCoreOutputs(
            outputs, self.make_stats() if self._log_stats else None, time.monotonic()
        )

    def update_draft_token_ids(
        self, req_ids: list[str], draft_token_ids: list[list[int]]
    ) -> None:
        """Take the drafts that the next step verifies, one list a request.

        Drafts of requests that have ended, whose prompt is not complete, or whose
        grammar cannot look ahead, are left: behind an unmasked draft could come a token
        that the grammar refuses.
        """
        for req_id, drafts in zip(req_ids, draft_token_ids, strict=True):
            if req_id in self._sampled_req_ids and req_id in self.requests:
                request = self.requests[req_id]
                if not self._grammar_manager.takes_drafts(request):
                    continue
                cap = request.sampling_params.num_speculative_tokens
                request.spec_token_ids = drafts if cap is None else drafts[:cap]

    def make_stats(self) -> SchedulerStats:
        """Return the gauges, and the counts since the last call."""
        self._is_report_due = False
        stats = SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_waiting_for_grammar_reqs=len(self.waiting_for_grammar),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.take_prefix_cache_stats(),
            num_preempted=self._num_preempted,
            step_prompt_tokens=self._num_prompt_tokens,
            step_generation_tokens=self._num_generation_tokens,
            num_corrupted_reqs=self._num_corrupted_reqs,
        )
        self._draft_ledger.report(stats, is_idle=not self.requests)
        self._num_preempted = self._num_corrupted_reqs = 0
        self._num_prompt_tokens = self._num_generation_tokens = 0
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; running requests are not disturbed."""
        self.kv_cache_manager.reset_prefix_cache()
        return True

    def check_integrity(self) -> None:
        """Check the blocks, and that each request is in the place of its status.

        Raises:
            AssertionError: something does not add up.
        """
        self.kv_cache_manager.check_integrity()
        places = {
            RequestStatus.RUNNING: {req.request_id for req in self.running},
            RequestStatus.WAITING_FOR_GRAMMAR: set(self.waiting_for_grammar),
        }
        waiting = {req.request_id for req in self.waiting}
        for request in self.requests.values():
            expected = places.get(request.status, waiting)
            assert request.request_id in expected, f"{request.request_id} is misplaced"
        num_placed = len(waiting) + sum(map(len, places.values()))
        assert num_placed == len(self.requests), "a request is in two places"

    def shutdown(self) -> None:
        """End every request."""
        self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)

    # What a step is made of.

    def _release_compiled_requests(self) -> None:
        """Let requests whose grammar is compiled wait like the others."""
        if not self.waiting_for_grammar:
            return
        for request in list(self.waiting_for_grammar.values()):
            state = request.structured_output_request
            assert state is not None, f"{request.request_id} waits for no grammar"
            if state.error is not None:
                message, parameter = state.error
                self._fail(request, message, parameter, is_overload=parameter is None)
            elif state.is_grammar_ready:
                del self.waiting_for_grammar[request.request_id]
                request.status = RequestStatus.WAITING
                self.waiting.add(request)

    def _advance(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed; rejected drafts are taken back later."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            num_prompt_left = request.num_prompt_tokens - request.num_computed_tokens
            self._num_prompt_tokens += min(max(num_prompt_left, 0), num_tokens)
            request.num_computed_tokens += num_tokens
            if (
                request.structured_output_request is not None
                and request.num_computed_tokens >= request.num_tokens
            ):
                output.structured_output_request_ids.append(request_id)

    # What comes out of a step.

    def _update_request(
        self, request: Request, result: ModelRunnerOutput, num_drafts: int
    ) -> EngineCoreOutput | None:
        request_id = request.request_id
        if request.num_computed_tokens < request.num_tokens:
            # A chunk of a prompt; what the worker says of it is no output.
            return None
        batch_idx = result.req_id_to_index.get(request_id)
        token_ids = [] if batch_idx is None else result.sampled_token_ids[batch_idx]
        request.num_computed_tokens -= max(num_drafts + 1 - len(token_ids), 0)
        settled = self._draft_ledger.settle(request_id, len(token_ids))
        is_first = request.num_output_tokens == 0
        commit = self._decide_commit(request, result, token_ids)
        if commit.num_kept < len(token_ids):
            token_ids = token_ids[: commit.num_kept]
        request.append_output_token_ids(token_ids)
        self._num_generation_tokens += len(token_ids)
        logprobs = None
        if (
            token_ids
            and batch_idx is not None
            and result.logprobs is not None
            and request.sampling_params.num_logprobs is not None
        ):
            logprobs = result.logprobs.slice_request(batch_idx, len(token_ids))
        output = EngineCoreOutput(
            request_id,
            token_ids,
            new_logprobs=logprobs,
            # A request that is computed again has already told them.
            new_prompt_logprobs=(
                result.prompt_logprobs_dict.get(request_id) if is_first else None
            ),
            events=request.take_events(),
            num_cached_tokens=request.num_cached_tokens,
            error=commit.error,
            error_parameter=commit.error_parameter,
            is_client_error=commit.error_parameter is not None,
            spec_decoding_step=settled.step,
            draft_trace=settled.trace,
        )
        if commit.status is not None:
            request.stop_reason = output.stop_reason = commit.stop_reason
            output.finish_reason = FINISH_REASONS[commit.status]
            self._release(request, commit.status)
        return output

    def _decide_commit(
        self, request: Request, result: ModelRunnerOutput, token_ids: list[int]
    ) -> Commit:
        error = None
        if result.num_nans_in_logits.get(request.request_id):
            self._num_corrupted_reqs += 1
            # Nobody shall find its blocks: their content is not to be trusted.
            request.num_computed_tokens = 0
            error = "the model's logits are not numbers (NaN)"
        elif not token_ids:
            error = "the model gave no token"
        if error is not None:
            return Commit(0, RequestStatus.FINISHED_ERROR, error=error)
        return decide_commit(
            request, token_ids, self._vocab_size, self._grammar_manager
        )

    # How requests end.

    def _check_can_run(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise VLLMValidationError(
                f"request id {request.request_id} is already in use",
                parameter="request_id",
                value=request.request_id,
            )
        num_tokens = request.num_prompt_tokens
        limits = [
            (self.max_model_len, "the model's maximum length"),
            (self.kv_cache_manager.capacity_tokens, "the KV cache's size"),
        ]
        if not self.limits.enable_chunked_prefill:
            limits.append(
                (
                    self.limits.max_num_batched_tokens,
                    "max_num_batched_tokens, without chunked prefill",
                )
            )
        for limit, name in limits:
            if num_tokens > limit:
                raise VLLMValidationError(
                    f"the prompt has {num_tokens} tokens, more than {limit}, {name}",
                    parameter="prompt",
                    value=num_tokens,
                )
        if num_tokens == 0:
            raise VLLMValidationError("the prompt is empty", parameter="prompt")

    def _fail_for_size(self, request: Request) -> None:
        self._fail(
            request,
            f"the request has {request.num_tokens} tokens and needs more room than the "
            f"KV cache has ({self.kv_cache_manager.capacity_tokens} tokens)",
        )

    def _fail(
        self,
        request: Request,
        message: str,
        parameter: str | None = None,
        *,
        is_overload: bool = False,
    ) -> None:
        """End a request with an error that the next outputs bring.

        Args:
            parameter: what the client can change; None: it is not the client's error.
            is_overload: the client can send the request again.
        """
        status = RequestStatus.FINISHED_ERROR
        self._pending_outputs.append(
            EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FINISH_REASONS[status],
                events=request.take_events(),
                num_cached_tokens=max(request.num_cached_tokens, 0),
                error=message,
                error_parameter=parameter,
                is_client_error=parameter is not None,
                is_overload=is_overload,
            )
        )
        self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self.waiting.remove(request)
        self.waiting_for_grammar.pop(request.request_id, None)
        self._release(request, status)

    def _release(self, request: Request, status: RequestStatus) -> None:
        """Give a request's blocks and row back; the caller takes it off its list."""
        if request.status is RequestStatus.RUNNING:
            self._finished_req_ids.add(request.request_id)
        self.kv_cache_manager.free(request)
        request.status = status
        del self.requests[request.request_id]
        self._is_report_due = True

    def _has_ends_to_report(self) -> bool:
        return (
            bool(self._finished_req_ids or self._pending_outputs) or self._is_report_due
        )


def _is_compiled(request: Request) -> bool:
    """Whether a request waits for its grammar no longer."""
    state = request.structured_output_request
    assert state is not None, f"{request.request_id} waits for no grammar"
    return state.is_grammar_ready or state.error is not None
