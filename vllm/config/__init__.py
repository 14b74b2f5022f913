"""The resolved configuration of an engine: frozen, complete and checked."""

from dataclasses import dataclass

from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]


@dataclass(frozen=True)
class VllmConfig:
    """All that the engine needs to know, joined."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    load_config: LoadConfig
    structured_outputs_config: StructuredOutputsConfig
    observability_config: ObservabilityConfig
    speculative_config: SpeculativeConfig | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts that a request can have in one step."""
        if self.speculative_config is None:
            return 0
        return self.speculative_config.num_speculative_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots behind a request's tokens that its drafter writes."""
        if self.speculative_config is None:
            return 0
        return self.speculative_config.num_lookahead_tokens
