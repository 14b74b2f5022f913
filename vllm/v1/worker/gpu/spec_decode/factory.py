"""The one place that knows which speculator a method names."""

import torch

from vllm.config import VllmConfig
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.draft_model.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import Speculator
from vllm.v1.worker.gpu.states import RequestState


def make_speculator(
    vllm_config: VllmConfig,
    req_states: RequestState,
    sampling_states: SamplingStates,
    block_table: BlockTable,
    device: torch.device,
) -> Speculator | None:
    """Return the speculator of a configuration; None without speculation."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    if config.method == "ngram":
        return NgramSpeculator(config, req_states)
    speculator_class = (
        DraftModelSpeculator if config.method == "draft_model" else DSparkSpeculator
    )
    return speculator_class(
        vllm_config, req_states, sampling_states, block_table, device
    )
