"""One device: its set-up, its memory, its model."""

import torch

from vllm import platforms
from vllm.config import VllmConfig
from vllm.exceptions import UnsupportedError
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.cpu_device import take_cpu
from vllm.v1.worker.gpu.cost_profiler import prepare_cost_model
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.adaptive_budget import AdaptiveBudget
from vllm.v1.worker.gpu.spec_decode.draft_budget import BudgetPolicy, VerifyAll
from vllm.v1.worker.gpu.warmup import warm_up

logger = init_logger(__name__)

# Of the memory that is free on a CPU machine after loading: others live there too.
_CPU_KV_CACHE_SHARE = 0.25
# The null block and one that a request can use.
_MIN_NUM_BLOCKS = 2


class Worker:
    """Owns a device and the model runner on it.

    Args:
        vllm_config: of the engine.
        budget_policy: how many drafts steps verify; None: as the configuration says.
    """

    def __init__(
        self, vllm_config: VllmConfig, budget_policy: BudgetPolicy | None = None
    ) -> None:
        self.vllm_config = vllm_config
        self._budget_policy = budget_policy
        self.device = torch.device(vllm_config.device_config.device)

    def init_device(self) -> None:
        """Take the device and build the rows on it."""
        if self.device.type == "cpu":
            take_cpu()
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def load_model(self) -> None:
        """Read the weights."""
        self.model_runner.load_model()

    def get_kv_cache_config(self) -> KVCacheConfig:
        """Decide how many blocks the cache has.

        Raises:
            UnsupportedError: one request of max_model_len tokens does not fit.
        """
        groups = self.model_runner.get_kv_cache_groups()
        num_blocks = self.vllm_config.cache_config.num_gpu_blocks_override
        if num_blocks is None:
            num_blocks = self._num_blocks_from_memory(groups)
        self._check_num_blocks(num_blocks)
        config = KVCacheConfig(num_blocks, groups)
        self._log_kv_cache(config)
        return config

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        self._kv_cache_config = kv_cache_config
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        """Run the first steps, so that no request waits for them."""
        warm_up(self.model_runner)
        self.model_runner.verifier.policy = (
            self._budget_policy or self._make_budget_policy()
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of a step."""
        self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step that was executed last."""
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts that the last step proposed; None if there are none."""
        return self.model_runner.take_draft_token_ids()

    def shutdown(self) -> None:
        """Give the device's memory back."""
        del self.model_runner
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_budget_policy(self) -> BudgetPolicy:
        config = self.vllm_config.speculative_config
        if config is None or not config.enable_adaptive_verification:
            return VerifyAll()
        costs = prepare_cost_model(self.model_runner, self._kv_cache_config)
        return AdaptiveBudget(costs)

    def _num_blocks_from_memory(self, groups: tuple[KVCacheGroupSpec, ...]) -> int:
        block_bytes = sum(group.block_bytes for group in groups)
        num_blocks = self._kv_cache_bytes() // block_bytes
        # More than every row at full length could use is waste.
        scheduler_config = self.vllm_config.scheduler_config
        block_size = self.vllm_config.cache_config.block_size
        max_model_len = self.vllm_config.model_config.max_model_len
        most = 1 + scheduler_config.max_num_seqs * -(-max_model_len // block_size)
        return min(num_blocks, most)

    def _kv_cache_bytes(self) -> int:
        cache_config = self.vllm_config.cache_config
        if cache_config.kv_cache_memory_bytes is not None:
            return cache_config.kv_cache_memory_bytes
        if self.device.type == "cpu":
            if cache_config.cpu_kvcache_space_bytes is not None:
                return cache_config.cpu_kvcache_space_bytes
            available = platforms.available_memory_bytes("cpu")
            return int(available * _CPU_KV_CACHE_SHARE)
        return self._cuda_kv_cache_bytes(cache_config.gpu_memory_utilization)

    def _cuda_kv_cache_bytes(self, utilization: float) -> int:
        torch.cuda.reset_peak_memory_stats()
        self.model_runner.profile_run()
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        others = total - free - torch.cuda.memory_reserved()
        return max(0, int(total * utilization) - others - peak)

    def _check_num_blocks(self, num_blocks: int) -> None:
        block_size = self.vllm_config.cache_config.block_size
        max_model_len = self.vllm_config.model_config.max_model_len
        num_tokens = (num_blocks - 1) * block_size
        if num_blocks < _MIN_NUM_BLOCKS or num_tokens < max_model_len:
            raise UnsupportedError(
                f"the KV cache holds {max(0, num_tokens)} tokens ({num_blocks} blocks "
                f"of {block_size}), but max_model_len is {max_model_len}: lower "
                "--max-model-len, or give the cache more memory with "
                "--kv-cache-memory-bytes, --num-gpu-blocks-override or "
                "VLLM_CPU_KVCACHE_SPACE"
            )

    def _log_kv_cache(self, config: KVCacheConfig) -> None:
        block_size = self.vllm_config.cache_config.block_size
        max_model_len = self.vllm_config.model_config.max_model_len
        num_tokens = (config.num_blocks - 1) * block_size
        logger.info(
            "KV cache: %d blocks of %d tokens in %s, %.1f requests of %d tokens at "
            "once",
            config.num_blocks,
            block_size,
            config.dtype_name,
            num_tokens / max_model_len,
            max_model_len,
        )
