"""The drafter that comes with the embedded model."""

import os

import pytest
from safetensors import safe_open

from vllm.transformers_utils.config import load_hf_config
from vllm.transformers_utils.configs.dspark import (
    DSparkConfig,
    check_fits_target,
    find_verifier,
    load_dspark_config,
)
from vllm.transformers_utils.model_files import EMBEDDED_MODEL_NAME

MAX_BYTES = 25_000_000


@pytest.fixture
def config(embedded_drafter: str) -> DSparkConfig:
    return load_dspark_config(embedded_drafter)


def test_it_fits_the_embedded_model(
    config: DSparkConfig, embedded_drafter: str, embedded_model: str
):
    check_fits_target(config, load_hf_config(embedded_model))
    assert find_verifier(embedded_drafter) == EMBEDDED_MODEL_NAME


def test_it_knows_how_sure_it_is(config: DSparkConfig):
    assert config.enable_confidence_head
    assert len(config.confidence_temperatures) == config.num_draft_tokens


def test_most_of_a_block_is_left_where_steps_are_cheap(config: DSparkConfig):
    assert (config.num_proposed_tokens, config.num_draft_tokens) == (3, 7)
    assert config.shortened(3).block_size == 3


def test_it_is_small(config: DSparkConfig, embedded_drafter: str):
    assert config.has_reduced_vocab
    path = os.path.join(embedded_drafter, "model.safetensors")
    assert os.path.getsize(path) <= MAX_BYTES
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        kinds = {str(file.get_tensor(name).dtype) for name in names - {"d2t", "t2d"}}
    assert kinds == {"torch.bfloat16"}
