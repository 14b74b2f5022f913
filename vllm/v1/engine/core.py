"""The control plane: requests in, steps, outputs out. Knows no strings, no sockets."""

from collections.abc import Callable, Iterable

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.startup import EngineCoreReady, StartupClock
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)

ExecutorFactory = Callable[[VllmConfig], Executor]


class EngineCore:
    """Owns the scheduler, the grammars and the executor, and makes the steps.

    Args:
        executor_factory: makes the executor; the configuration's own if None.
        on_wake_up: called from another thread when a step may have become possible
            without a new request, because a grammar is compiled.
        clock: measures the phases of start-up.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_factory: ExecutorFactory | None = None,
        *,
        log_stats: bool,
        on_wake_up: Callable[[], None],
        clock: StartupClock | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self._on_wake_up = on_wake_up
        self._rejected: list[EngineCoreOutput] = []
        # The last step could schedule nothing.
        self.is_stalled = False
        clock = clock or StartupClock()
        make_executor = executor_factory or Executor.get_class(vllm_config)
        with clock.measure("device"):
            self.executor = make_executor(vllm_config)
            self.executor.init_device()
        with clock.measure("weights"):
            self.executor.load_model()
        with clock.measure("KV cache"):
            kv_cache_config = self.executor.get_kv_cache_config()
            self.executor.initialize_from_config(kv_cache_config)
        with clock.measure("warm-up"):
            self.executor.compile_or_warm_up_model()
        self.structured_output_manager = StructuredOutputManager(
            vllm_config,
            lambda: Tokenizer.from_path(vllm_config.model_config.tokenizer),
        )
        self.scheduler = Scheduler(
            vllm_config, kv_cache_config, self.structured_output_manager, log_stats
        )
        self.ready = EngineCoreReady(
            kv_cache_config.num_blocks, kv_cache_config.dtype_name, clock.phases
        )

    def warm_up_grammars(self) -> None:
        """Prepare the grammar backend in the background."""
        self.structured_output_manager.warm_up()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a sequence; one that cannot be taken gets its error with the next step.

        No bad request may reach the caller as an exception: others wait behind it.
        """
        try:
            self._add_request(request)
        except VLLMValidationError as error:
            self._reject(request.request_id, error.message, error.parameter, True)
        except Exception as error:
            logger.exception("Request %s could not be queued", request.request_id)
            message = f"{type(error).__name__}: {error}"
            self._reject(request.request_id, message, None, False)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Stop sequences at once; unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_requests(self) -> bool:
        """Whether any sequence has not ended, or its end was not reported."""
        return bool(self._rejected) or self.scheduler.has_requests()

    def can_step(self) -> bool:
        """Whether a step has something to do; not while all wait for a grammar."""
        return bool(self._rejected) or self.scheduler.has_runnable_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedule, run and sample one step."""
        rejected, self._rejected = self._rejected, []
        scheduler_output = self.scheduler.schedule()
        self.is_stalled = scheduler_output.total_num_scheduled_tokens == 0
        self.executor.execute_model(scheduler_output)
        # On a device the forward pass runs while the masks are filled.
        grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)
        model_output = self.executor.sample_tokens(grammar_output)
        outputs = self.scheduler.update_from_output(
            scheduler_output, model_output, grammar_output
        )
        drafts = self.executor.take_draft_token_ids()
        if drafts is not None:
            self.scheduler.update_draft_token_ids(
                drafts.req_ids, drafts.draft_token_ids
            )
        if rejected:
            outputs.outputs = [*rejected, *outputs.outputs]
        return outputs

    def check_integrity(self) -> None:
        """Check that no block of the KV cache is lost or held twice.

        Raises:
            AssertionError: the counts do not add up.
        """
        self.scheduler.check_integrity()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if a running request prevents it."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the helpers' threads and free the device."""
        self.structured_output_manager.shutdown()
        self.scheduler.shutdown()
        self.executor.shutdown()

    def _add_request(self, core_request: EngineCoreRequest) -> None:
        request = Request.from_engine_core_request(
            core_request, self.scheduler.block_hasher
        )
        if core_request.sampling_params.structured_outputs is not None:
            self.structured_output_manager.grammar_init(request, self._on_wake_up)
        self.scheduler.add_request(request)

    def _reject(
        self,
        request_id: str,
        message: str,
        parameter: str | None,
        is_client_error: bool,
    ) -> None:
        self._rejected.append(
            EngineCoreOutput(
                request_id,
                [],
                finish_reason=FinishReason.ERROR,
                error=message,
                error_parameter=parameter,
                is_client_error=is_client_error,
            )
        )
