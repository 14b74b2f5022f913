import pytest

from vllm.exceptions import UnsupportedError
from vllm.model_executor.models.registry import get_model_class, supported_architectures
from vllm.transformers_utils.config import SUPPORTED_ARCHITECTURES
from vllm.transformers_utils.gguf_config import GGUF_ARCHITECTURES


def test_configurations_and_models_know_the_same_architectures():
    assert supported_architectures() == SUPPORTED_ARCHITECTURES
    assert set(GGUF_ARCHITECTURES.values()) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_class_has_the_architectures_name(architecture):
    assert get_model_class(architecture).__name__ == architecture


def test_unknown_architecture_is_refused():
    with pytest.raises(UnsupportedError, match="'MambaForCausalLM' is not supported"):
        get_model_class("MambaForCausalLM")
