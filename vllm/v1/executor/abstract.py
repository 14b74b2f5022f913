"""What the engine core asks of the workers, however many there are."""

from abc import ABC, abstractmethod

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class Executor(ABC):
    """Runs the model; the methods of start-up are called once, in this order."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type["Executor"]:
        """Return the executor that this configuration needs."""
        # The module is imported where it is needed: the front never loads a worker.
        from vllm.v1.executor.uniproc import UniProcExecutor

        return UniProcExecutor

    @abstractmethod
    def init_device(self) -> None:
        """Claim the device."""

    @abstractmethod
    def load_model(self) -> None:
        """Load the weights."""

    @abstractmethod
    def get_kv_cache_config(self) -> KVCacheConfig:
        """Measure the memory and return the size of the KV cache.

        Raises:
            UnsupportedError: one request of max_model_len tokens does not fit.
        """

    @abstractmethod
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache."""

    @abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Run what would otherwise make the first request slow."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of a step."""

    @abstractmethod
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the forward pass that `execute_model` has run."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts that the last step proposed; None if there are none."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Free the device."""
