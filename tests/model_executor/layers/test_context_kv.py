import pytest
import torch

from tests.model_executor.dspark_harness import CPU, make_config
from vllm.model_executor.layers.context_kv import ContextKV
from vllm.model_executor.models.qwen3_dspark import DSparkModel
from vllm.v1.attention.selector import get_attn_backend


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_the_product_stands_on_the_device_of_the_layers(bias):
    with torch.device("meta"):
        model = DSparkModel(
            make_config(attention_bias=bias),
            16,
            get_attn_backend(CPU, torch.float32),
            torch.float32,
            has_embedding=True,
            has_head=True,
            has_vocab_map=False,
        )
    made = dict(ContextKV(model.attentions).named_parameters())
    assert len(made) == 1 + bias
    assert all(parameter.is_meta for parameter in made.values())
