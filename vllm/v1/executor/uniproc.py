"""One worker, in the process of the engine core."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class UniProcExecutor(Executor):
    """Calls its worker directly.

    Args:
        worker_class: makes the worker; the product's own class if None.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        worker_class: Callable[[VllmConfig], Any] | None = None,
    ) -> None:
        super().__init__(vllm_config)
        if worker_class is None:
            from vllm.v1.worker.gpu_worker import Worker

            worker_class = Worker
        self.worker = worker_class(vllm_config)

    def init_device(self) -> None:
        self.worker.init_device()

    def load_model(self) -> None:
        self.worker.load_model()

    def get_kv_cache_config(self) -> KVCacheConfig:
        return self.worker.get_kv_cache_config()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        self.worker.compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.worker.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        return self.worker.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.worker.take_draft_token_ids()

    def shutdown(self) -> None:
        self.worker.shutdown()
