"""The engine for a caller that steps: requests in, outputs of each step out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import Tokenizer
from vllm.v1.engine.core_client import SyncEngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor, Prompt
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core_process import ExecutorFactory
    from vllm.v1.metrics.reader import Metric


class LLMEngine:
    """Runs requests for one caller; in its process unless the environment says not.

    Args:
        executor_factory: makes the executor; None for the configuration's own.

    Raises:
        UnsupportedError, CheckpointError: the engine cannot start with this set-up.
        VLLMValidationError: it asks for a dashboard, which only a server has.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        log_stats: bool = False,
        executor_factory: "ExecutorFactory | None" = None,
    ) -> None:
        if vllm_config.observability_config.enable_dashboard:
            raise VLLMValidationError(
                "the dashboard is a page of the server: start it with vllm serve",
                parameter="enable_dashboard",
            )
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        self.tokenizer = Tokenizer.from_path(vllm_config.model_config.tokenizer)
        self.input_processor = InputProcessor(vllm_config, self.tokenizer)
        self.output_processor = OutputProcessor.from_config(
            self.tokenizer, vllm_config, log_stats=log_stats
        )
        self._client = SyncEngineCoreClient.make(
            vllm_config, executor_factory, log_stats=log_stats
        )
        self._stat_loggers = StatLoggerManager(vllm_config, log_stats=log_stats)
        ready = self._client.ready
        self._stat_loggers.log_engine_initialized(
            ready.num_gpu_blocks, ready.cache_dtype
        )
        # Outputs of a step in which a request failed, and the failures not told yet.
        self._held_outputs: list[RequestOutput] = []
        self._held_errors: dict[str, Exception] = {}

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> "LLMEngine":
        """Start an engine with the configuration's choice of statistics."""
        log_stats = not vllm_config.observability_config.disable_log_stats
        return cls(vllm_config, log_stats=log_stats)

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "LLMEngine":
        """Start an engine by its arguments."""
        return cls.from_vllm_config(engine_args.create_engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            arrival_time: seconds of `time.time()`; now if None.

        Raises:
            VLLMValidationError: the request is wrong; the engine is untouched.
        """
        text, request = self.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        children = self.output_processor.add_request(
            request, text, drops_output=params.max_tokens == 0
        )
        self._client.add_requests(children)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed.

        Raises:
            VLLMValidationError, EngineGenerateError: a request, named in the error's
                notes, has failed; the outputs of the others, and the next failure,
                come with the next calls.
            EngineDeadError: the engine has stopped.
        """
        if self._held_errors:
            raise self._take_error()
        if self._held_outputs or not self.has_unfinished_requests():
            held, self._held_outputs = self._held_outputs, []
            return held
        outputs = self._client.get_output()
        stats = self.output_processor.make_iteration_stats()
        result = self.output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, stats
        )
        if result.reqs_to_abort:
            self._client.abort_requests(result.reqs_to_abort)
        self._stat_loggers.record(outputs.scheduler_stats, stats)
        if result.errors:
            self._held_outputs = result.request_outputs
            self._held_errors = result.errors
            raise self._take_error()
        return result.request_outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not ended or an output was not fetched."""
        return bool(self._held_outputs or self._held_errors) or (
            self.output_processor.has_unfinished_requests()
        )

    def get_num_unfinished_requests(self) -> int:
        """Return the number of sequences that have not ended."""
        return self.output_processor.get_num_unfinished_requests()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; nothing of them will be returned any more."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        sequence_ids = self.output_processor.abort_requests(ids)
        gone = set(ids)
        self._held_outputs = [
            output for output in self._held_outputs if output.request_id not in gone
        ]
        for request_id in gone:
            self._held_errors.pop(request_id, None)
        if sequence_ids:
            self._client.abort_requests(sequence_ids)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer

    def check_integrity(self) -> None:
        """Check that no request and no block of the KV cache is lost or held twice.

        Raises:
            AssertionError: the counts do not add up.
        """
        self._client.call_utility("check_integrity")

    def get_metrics(self) -> "list[Metric]":
        """Return what the engine has counted.

        Raises:
            VLLMValidationError: statistics are off.
        """
        if not self.log_stats:
            raise VLLMValidationError(
                "statistics are off; start the engine with disable_log_stats=False",
                parameter="disable_log_stats",
            )
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return get_metrics_snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if a running request prevents it."""
        return self._client.call_utility("reset_prefix_cache")

    def do_log_stats(self) -> None:
        """Write the line of statistics now."""
        self._stat_loggers.log()

    def shutdown(self) -> None:
        """End the engine; safe to call twice."""
        self._client.shutdown()

    def _take_error(self) -> Exception:
        request_id = next(iter(self._held_errors))
        error = self._held_errors.pop(request_id)
        error.add_note(f"request_id: {request_id}")
        return error
