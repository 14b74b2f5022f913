"""What the engine core says, made into what each caller waits for."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import (
    CompletionOutput,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
    SpecDecodeMetrics,
)
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineGenerateError, EngineOverloadedError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.token_texts import TokenTable
from vllm.v1.metrics.stats import IterationStats, ParentRequestStats

logger = init_logger(__name__)


@dataclass
class OutputProcessorOutput:
    """What one batch of engine-core outputs led to.

    Args:
        request_outputs: of requests that have no collector.
        errors: request id -> why it failed, of requests that have no collector.
        reqs_to_abort: sequences that a stop string has ended; the core must be told.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    reqs_to_abort: list[str] = field(default_factory=list)


class RequestState:
    """One sequence, as the front knows it."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        index: int,
        tokenizer: Tokenizer,
        token_table: TokenTable,
        parent: ParentRequest | None,
        collector: RequestOutputCollector | None,
        *,
        drops_output: bool,
        spec_decode_metrics: SpecDecodeMetrics | None,
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.parent = parent
        self.collector = collector
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.max_tokens = 0 if drops_output else params.max_tokens
        self.stats = RequestStateStats(arrival_time=request.arrival_time)
        self.spec_decode_metrics = spec_decode_metrics
        if parent is None:
            self.stats.spec_decode_metrics = spec_decode_metrics
        self.num_cached_tokens = 0
        self.detokenizer = IncrementalDetokenizer(
            tokenizer, token_table, params, request.prompt_token_ids
        )
        self.logprobs = LogprobsProcessor(token_table, params, request.prompt_token_ids)
        self._stop_token_ids = {params.eos_token_id, *params.all_stop_token_ids}
        self._index = index
        self._output_kind = params.output_kind
        self._drops_output = drops_output
        self._num_taken_tokens = 0
        self._has_shown_prompt_logprobs = False

    @property
    def external_request_id(self) -> str:
        """The id that the caller gave."""
        return self.parent.request_id if self.parent else self.request_id

    def apply(self, output: EngineCoreOutput) -> tuple[FinishReason | None, bool]:
        """Take the new tokens, up to a stop string.

        Returns:
            Why the sequence has ended, or None; and whether a stop string ended it
            before the engine core did. `output` is changed to what was kept.
        """
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
            if self.parent is not None and self._index == 0:
                # The other children hit what the first one has computed.
                self.parent.num_cached_tokens = output.num_cached_tokens
        if output.spec_decoding_step is not None and self.spec_decode_metrics:
            self.spec_decode_metrics.observe(*output.spec_decoding_step)
        self.logprobs.update_prompt(output.new_prompt_logprobs)
        if self._drops_output:
            output.new_token_ids, output.new_logprobs = [], None
            if output.finish_reason == FinishReason.STOP:
                output.finish_reason, output.stop_reason = FinishReason.LENGTH, None
        finish_reason = output.finish_reason
        num_old_tokens = len(self.detokenizer.token_ids)
        # A closed grammar stops at a token of the text: only a stop token is not shown.
        is_stop_token_last = (
            finish_reason == FinishReason.STOP
            and bool(output.new_token_ids)
            and output.new_token_ids[-1] in self._stop_token_ids
        )
        stop = self.detokenizer.update(output.new_token_ids, is_stop_token_last)
        if stop is None and finish_reason is not None:
            stop = self.detokenizer.finish()
        num_new_tokens = len(self.detokenizer.token_ids) - num_old_tokens
        self.logprobs.update(output.new_logprobs, num_new_tokens)
        output.new_token_ids = output.new_token_ids[:num_new_tokens]
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        return output.finish_reason, stop is not None and finish_reason is None

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """Return what the caller may see now, or None."""
        is_finished = finish_reason is not None
        has_news = len(self.detokenizer.token_ids) > self._num_taken_tokens
        is_final_only = self._output_kind == RequestOutputKind.FINAL_ONLY
        if not is_finished and (is_final_only or not has_news):
            return None
        outputs = [self._make_completion(finish_reason, stop_reason)]
        if self.parent is not None:
            outputs = self.parent.gather(outputs[0], len(self.detokenizer.token_ids))
            is_finished = self.parent.is_finished
            if not outputs:
                return None
        return RequestOutput(
            request_id=self.external_request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=outputs,
            finished=is_finished,
            metrics=self.stats,
            num_cached_tokens=(
                self.parent.num_cached_tokens if self.parent else self.num_cached_tokens
            ),
        )

    def _make_completion(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        is_delta = self._output_kind == RequestOutputKind.DELTA
        is_finished = finish_reason is not None
        start = self._num_taken_tokens if is_delta else 0
        token_ids = self.detokenizer.token_ids[start:]
        self._num_taken_tokens = len(self.detokenizer.token_ids)
        return CompletionOutput(
            index=self._index,
            text=self.detokenizer.take_text(is_finished, is_delta),
            token_ids=token_ids,
            cumulative_logprob=self.logprobs.cumulative_logprob,
            logprobs=self.logprobs.take_logprobs(start),
            finish_reason=str(finish_reason) if finish_reason is not None else None,
            stop_reason=stop_reason if is_finished else None,
            spec_decode_metrics=self.spec_decode_metrics,
        )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        # Every child has the prompt's; in deltas they come once, with the first output.
        logprobs = self.logprobs.prompt_logprobs
        if self._output_kind != RequestOutputKind.DELTA:
            return logprobs
        if logprobs is None or self._has_shown_prompt_logprobs:
            return None
        self._has_shown_prompt_logprobs = True
        return logprobs


class OutputProcessor:
    """The front's table of requests.

    Args:
        log_stats: collect times and counts of requests.
        num_spec_tokens: drafts that a step can have.
        spec_decode_metrics_level: one of SPEC_DECODE_METRICS_LEVELS, what requests keep
            of the fate of their drafts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        log_stats: bool,
        num_spec_tokens: int = 0,
        spec_decode_metrics_level: str = "none",
    ) -> None:
        self.tokenizer = tokenizer
        self._token_table = TokenTable(tokenizer)
        self._log_stats = log_stats
        self._num_spec_tokens = num_spec_tokens
        self._spec_decode_metrics_level = spec_decode_metrics_level
        self.request_states: dict[str, RequestState] = {}
        # n > 1 only: the caller's id -> the parent.
        self.parent_requests: dict[str, ParentRequest] = {}

    @classmethod
    def from_config(
        cls, tokenizer: Tokenizer, vllm_config: VllmConfig, *, log_stats: bool
    ) -> "OutputProcessor":
        """Make the table of an engine; what answers tell is collected in any case."""
        config = vllm_config.observability_config
        return cls(
            tokenizer,
            log_stats=log_stats or config.enable_per_request_metrics,
            num_spec_tokens=vllm_config.num_speculative_tokens,
            spec_decode_metrics_level=config.per_request_spec_decode_metrics,
        )

    def make_iteration_stats(self) -> IterationStats | None:
        """Return what the next outputs are counted in, or None."""
        return IterationStats() if self._log_stats else None

    def has_unfinished_requests(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of sequences that have not ended."""
        return len(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        collector: RequestOutputCollector | None = None,
        *,
        drops_output: bool = False,
    ) -> list[EngineCoreRequest]:
        """Register a request; return the sequences that the engine core must run.

        Args:
            drops_output: the engine samples a token that nobody asked for.

        Raises:
            VLLMValidationError: the id is in use.
        """
        request_id = request.request_id
        if request_id in self.parent_requests or request_id in self.request_states:
            raise VLLMValidationError(
                f"request_id {request_id!r} is in use by another request",
                parameter="request_id",
                value=request_id,
            )
        parent, children = None, [request]
        if request.sampling_params.n > 1:
            parent = ParentRequest(request_id, request.sampling_params)
            children = parent.make_children(request)
            self.parent_requests[request_id] = parent
        for index, child in enumerate(children):
            self.request_states[child.request_id] = RequestState(
                child,
                prompt,
                index,
                self.tokenizer,
                self._token_table,
                parent,
                collector,
                drops_output=drops_output,
                spec_decode_metrics=self._make_spec_decode_metrics(),
            )
        return children

    def abort_requests(
        self,
        request_ids: Iterable[str],
        iteration_stats: IterationStats | None = None,
    ) -> list[str]:
        """End requests by the callers' ids; return the sequences to stop.

        A caller that still waits gets what there is, with finish reason `abort`.
        """
        states: list[RequestState] = []
        for request_id in request_ids:
            states += self._pop_states(request_id)
        for state in states:
            output = state.make_request_output(FinishReason.ABORT, None)
            self._finish(FinishReason.ABORT, state, iteration_stats)
            if output is not None and state.collector is not None:
                state.collector.put(output)
        return [state.request_id for state in states]

    def propagate_error(self, error: Exception) -> None:
        """End every request with `error`: the engine is dead."""
        for state in self.request_states.values():
            if state.collector is not None:
                state.collector.put(error)
        self.request_states.clear()
        self.parent_requests.clear()

    def process_outputs(
        self,
        outputs: list[EngineCoreOutput],
        timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Update the requests and hand out what their callers may see.

        Args:
            timestamp: when the step ended, seconds of the engine core's clock.
            iteration_stats: counts what happened; None does not count.
        """
        result = OutputProcessorOutput()
        for output in outputs:
            state = self.request_states.get(output.request_id)
            # The request was aborted while the step ran.
            if state is None:
                continue
            try:
                self._process_output(output, state, timestamp, iteration_stats, result)
            except Exception as error:
                # One request's tokens must not end the others.
                logger.exception("Request %s cannot be shown", output.request_id)
                failure = EngineCoreOutput(
                    output.request_id, [], error=f"{type(error).__name__}: {error}"
                )
                result.reqs_to_abort.append(output.request_id)
                self._fail(failure, state, iteration_stats, result)
        return result

    def _process_output(
        self,
        output: EngineCoreOutput,
        state: RequestState,
        timestamp: float,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        if output.finish_reason == FinishReason.ERROR:
            self._fail(output, state, iteration_stats, result)
            return
        if (
            iteration_stats is not None
            # Before the tokens are dropped: who only scores a prompt has computed it.
            and output.new_token_ids
            and not state.stats.num_generation_tokens
        ):
            iteration_stats.update_from_prompt(
                len(state.prompt_token_ids), output.num_cached_tokens
            )
        finish_reason, must_abort = state.apply(output)
        if iteration_stats is not None:
            iteration_stats.update_from_output(output, timestamp, state.stats)
        if finish_reason is not None:
            del self.request_states[output.request_id]
            if must_abort:
                result.reqs_to_abort.append(output.request_id)
        request_output = state.make_request_output(finish_reason, output.stop_reason)
        if finish_reason is not None:
            self._finish(finish_reason, state, iteration_stats)
        if request_output is None:
            return
        if state.collector is not None:
            state.collector.put(request_output)
        else:
            result.request_outputs.append(request_output)

    def _finish(
        self,
        finish_reason: FinishReason,
        state: RequestState,
        iteration_stats: IterationStats | None,
    ) -> None:
        parent = state.parent
        is_complete = parent is None or parent.is_finished
        if parent is not None and is_complete:
            self.parent_requests.pop(parent.request_id, None)
        if iteration_stats is None:
            return
        iteration_stats.update_from_finished_request(
            str(finish_reason),
            len(state.prompt_token_ids),
            state.num_cached_tokens,
            state.max_tokens,
            state.stats,
        )
        if is_complete:
            num_tokens = state.stats.num_generation_tokens
            iteration_stats.finished_parents.append(
                ParentRequestStats(
                    n_param=parent.params.n if parent else 1,
                    max_num_generation_tokens=(
                        parent.max_num_generation_tokens if parent else num_tokens
                    ),
                )
            )

    def _make_spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        level = self._spec_decode_metrics_level
        if level == "none" or self._num_spec_tokens == 0:
            return None
        return SpecDecodeMetrics.make(
            self._num_spec_tokens, is_detailed=level == "detailed"
        )

    def _pop_states(self, request_id: str) -> list[RequestState]:
        parent = self.parent_requests.pop(request_id, None)
        sequence_ids = list(parent.child_request_ids) if parent else [request_id]
        states = [self.request_states.pop(key, None) for key in sequence_ids]
        return [state for state in states if state is not None]

    def _fail(
        self,
        output: EngineCoreOutput,
        state: RequestState,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        message = output.error or "the request failed in the engine"
        error: Exception
        if output.is_client_error:
            error = VLLMValidationError(message, parameter=output.error_parameter)
        elif output.is_overload:
            error = EngineOverloadedError(message)
        else:
            error = EngineGenerateError(message)
        # Siblings of a failed child have no caller any more.
        result.reqs_to_abort += [
            sibling.request_id
            for sibling in self._pop_states(state.external_request_id)
            if sibling is not state
        ]
        if iteration_stats is not None:
            iteration_stats.update_from_finished_request(
                str(FinishReason.ERROR),
                len(state.prompt_token_ids),
                state.num_cached_tokens,
                state.max_tokens,
                state.stats,
            )
        if state.collector is not None:
            state.collector.put(error)
        else:
            result.errors[state.external_request_id] = error
