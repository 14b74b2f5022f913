"""The engine for an event loop: many callers, one output each, the core elsewhere."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.input_processor import InputProcessor, Prompt
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.core_process import ExecutorFactory
    from vllm.v1.metrics.dashboard.collector import Dashboard

logger = init_logger(__name__)

# Shorter texts are tokenized in less time than a thread takes to answer.
_MIN_CHARS_FOR_THREAD = 2048
_NUM_INPUT_THREADS = 2
# Outputs handled before other tasks of the loop may run.
_OUTPUT_CHUNK_SIZE = 128
_MAX_LOGGED_CHARS = 500


class AsyncLLM:
    """Serves requests concurrently; the engine core runs in a process of its own.

    Construction blocks until the engine is ready and may happen in any thread. Every
    coroutine belongs to one event loop.

    Args:
        executor_factory: makes the executor in the engine's process; None for the
            configuration's own.

    Raises:
        UnsupportedError, CheckpointError: the engine cannot start with this set-up.
        EngineDeadError: the start has failed otherwise.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        log_stats: bool = True,
        executor_factory: "ExecutorFactory | None" = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        # Before the engine: a bad tokenizer must not cost a start.
        self.tokenizer = Tokenizer.from_path(vllm_config.model_config.tokenizer)
        self.input_processor = InputProcessor(vllm_config, self.tokenizer)
        self.output_processor = OutputProcessor.from_config(
            self.tokenizer, vllm_config, log_stats=log_stats
        )
        self._client = AsyncMPClient(vllm_config, executor_factory, log_stats=log_stats)
        self.dashboard = self._make_dashboard()
        self._stat_loggers = StatLoggerManager(
            vllm_config, log_stats=log_stats, dashboard=self.dashboard
        )
        ready = self._client.ready
        self._stat_loggers.log_engine_initialized(
            ready.num_gpu_blocks, ready.cache_dtype
        )
        self._input_pool = ThreadPoolExecutor(
            _NUM_INPUT_THREADS, thread_name_prefix="input"
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._dead_error: EngineDeadError | None = None
        self._death = asyncio.Event()

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, *, log_stats: bool | None = None
    ) -> "AsyncLLM":
        """Start an engine; `log_stats` overrides the configuration."""
        if log_stats is None:
            log_stats = not vllm_config.observability_config.disable_log_stats
        return cls(vllm_config, log_stats=log_stats)

    @classmethod
    def from_engine_args(cls, engine_args: "AsyncEngineArgs") -> "AsyncLLM":
        """Start an engine by its flags."""
        return cls.from_vllm_config(engine_args.create_engine_config())

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped and answers no more."""
        return self._dead_error is not None or not self._client.is_alive

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine has stopped."""
        return self._dead_error or EngineDeadError("it was shut down")

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return not self.errored

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they come; leaving early aborts the request.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            arrival_time: seconds of `time.time()`; now if None.

        Raises:
            VLLMValidationError: the request is wrong; the engine is untouched.
            EngineGenerateError: this request has failed in the engine.
            EngineDeadError: the engine has stopped.
        """
        collector = RequestOutputCollector(sampling_params.output_kind)
        self._start_tasks()
        request_text = await self._process_inputs(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
            add_special_tokens=add_special_tokens,
        )
        self._add_request(*request_text, sampling_params, collector)
        is_finished = False
        try:
            while not is_finished:
                # Without a switch of tasks if something waits already.
                output = collector.get_nowait() or await collector.get()
                is_finished = output.finished
                yield output
        finally:
            # Also when the caller has gone: GeneratorExit or CancelledError.
            if not is_finished:
                self._abort([request_id])
            elif self.vllm_config.observability_config.enable_log_outputs:
                _log_output(output)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their callers get what there is, with reason `abort`."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    async def check_health(self) -> None:
        """Do nothing if the engine runs.

        Raises:
            EngineDeadError: it does not.
        """
        self._start_tasks()

    async def wait_until_dead(self) -> EngineDeadError:
        """Wait for the engine to stop unasked; return why it did."""
        if self._dead_error is None:
            self._start_tasks()
        await self._death.wait()
        return self.dead_error

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if a running request prevents it."""
        return await self._call_utility("reset_prefix_cache")

    async def check_integrity(self) -> None:
        """Check the engine's bookkeeping of KV blocks.

        Raises:
            RuntimeError: the counts do not add up.
        """
        await self._call_utility("check_integrity")

    async def do_log_stats(self) -> None:
        """Write the line of statistics now."""
        self._stat_loggers.log()

    def shutdown(self) -> None:
        """End the engine; safe to call twice."""
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self._tasks.clear()
        self._fail_all(EngineDeadError("it was shut down"))
        self._input_pool.shutdown(wait=False, cancel_futures=True)
        self._client.shutdown()

    def _make_dashboard(self) -> "Dashboard | None":
        if not self.vllm_config.observability_config.enable_dashboard:
            return None
        from vllm.v1.metrics.dashboard.collector import Dashboard

        return Dashboard(self.vllm_config, self.tokenizer)

    async def _process_inputs(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> tuple[str | None, EngineCoreRequest]:
        process = partial(
            self.input_processor.process_inputs, request_id, prompt, params, **kwargs
        )
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        num_chars = len(text) if isinstance(text, str) else 0
        num_chars += sum(map(len, params.bad_words or ()))
        is_long = num_chars >= _MIN_CHARS_FOR_THREAD
        # A large schema is checked keyword by keyword, for tenths of a second.
        if is_long or params.structured_outputs is not None:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._input_pool, process)
        return process()

    def _add_request(
        self,
        prompt: str | None,
        request: EngineCoreRequest,
        params: SamplingParams,
        collector: RequestOutputCollector,
    ) -> None:
        if self._dead_error is not None:
            raise self._dead_error
        if self.vllm_config.observability_config.enable_log_requests:
            _log_request(prompt, request)
        children = self.output_processor.add_request(
            request, prompt, collector, drops_output=params.max_tokens == 0
        )
        try:
            self._client.add_requests(children)
        except BaseException:
            self.output_processor.abort_requests([request.request_id])
            raise

    def _abort(self, request_ids: list[str]) -> None:
        stats = self.output_processor.make_iteration_stats()
        sequence_ids = self.output_processor.abort_requests(request_ids, stats)
        if not sequence_ids:
            return
        self._stat_loggers.record(None, stats)
        if self.dashboard is not None:
            self.dashboard.end_requests(sequence_ids, "abort")
        try:
            self._client.abort_requests(sequence_ids)
        except EngineDeadError:
            # A stopped engine has nothing left to abort.
            logger.debug("The engine has stopped before %s was aborted", request_ids)

    async def _call_utility(self, method: str) -> Any:
        self._start_tasks()
        return await self._client.call_utility_async(method)

    def _start_tasks(self) -> None:
        """Start the tasks in the caller's loop, unless they run.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        if self._dead_error is not None:
            raise self._dead_error
        # They are done if they belonged to a loop that has been closed.
        if self._tasks and not self._tasks[0].done():
            return
        tasks = [self._handle_outputs()]
        if self.log_stats:
            tasks.append(self._log_stats_periodically())
        self._tasks = [asyncio.create_task(task) for task in tasks]

    async def _handle_outputs(self) -> None:
        try:
            while True:
                await self._process_outputs(await self._client.get_output_async())
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            # Nobody would read the outputs any more, so everybody is told.
            logger.exception("The handling of outputs has failed")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    async def _process_outputs(self, outputs: EngineCoreOutputs) -> None:
        if self.dashboard is not None:
            self.dashboard.trace(outputs)
        stats = None
        if outputs.outputs:
            stats = self.output_processor.make_iteration_stats()
        for start in range(0, len(outputs.outputs), _OUTPUT_CHUNK_SIZE):
            if start:
                await asyncio.sleep(0)
            result = self.output_processor.process_outputs(
                outputs.outputs[start : start + _OUTPUT_CHUNK_SIZE],
                outputs.timestamp,
                stats,
            )
            if result.reqs_to_abort:
                self._client.abort_requests(result.reqs_to_abort)
                if self.dashboard is not None:
                    self.dashboard.end_requests(result.reqs_to_abort, "ended")
        self._stat_loggers.record(outputs.scheduler_stats, stats)

    async def _log_stats_periodically(self) -> None:
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            self._stat_loggers.log()

    def _die(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        self._fail_all(error)
        self._death.set()

    def _fail_all(self, error: EngineDeadError) -> None:
        if self._dead_error is None:
            self._dead_error = error
        self.output_processor.propagate_error(error)
        self._client.fail_calls(error)


def _log_request(prompt: str | None, request: EngineCoreRequest) -> None:
    logger.info(
        "Received request %s: prompt: %r, params: %s, %d prompt tokens",
        request.request_id,
        _clip(prompt or ""),
        _clip(str(request.sampling_params)),
        len(request.prompt_token_ids),
    )


def _log_output(output: RequestOutput) -> None:
    for completion in output.outputs:
        logger.info(
            "Finished request %s, answer %d: output: %r, finish reason: %s",
            output.request_id,
            completion.index,
            _clip(completion.text),
            completion.finish_reason,
        )


def _clip(text: str) -> str:
    if len(text) <= _MAX_LOGGED_CHARS:
        return text
    return text[:_MAX_LOGGED_CHARS] + "..."
