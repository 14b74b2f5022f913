"""The one place that knows which speculator a method names."""

import torch

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.worker.gpu.block_table import BlockTable
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.confidence.estimator import ConfidenceEstimator
from vllm.v1.worker.gpu.spec_decode.confidence.scale import (
    CERTAINTIES,
    HEAD_LOGITS,
    MATCH_LENGTHS,
    ScoreScale,
)
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
    confidence = ConfidenceEstimator(
        _find_scale(config),
        vllm_config.scheduler_config.max_num_seqs,
        config.num_speculative_tokens,
        sampling_states,
        device,
    )
    if config.method == "ngram":
        return NgramSpeculator(config, req_states, confidence)
    speculator_class = (
        DraftModelSpeculator if config.method == "draft_model" else DSparkSpeculator
    )
    return speculator_class(
        vllm_config, req_states, sampling_states, block_table, confidence, device
    )


def _find_scale(config: SpeculativeConfig) -> ScoreScale:
    """Return what the scores of a method mean."""
    if config.method == "ngram":
        return MATCH_LENGTHS
    has_head = config.dspark_config and config.dspark_config.enable_confidence_head
    return HEAD_LOGITS if has_head else CERTAINTIES
