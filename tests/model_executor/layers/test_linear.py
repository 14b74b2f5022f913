import pytest
import torch

from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.model_executor.layers.linear import Linear


def filled(bias: bool) -> Linear:
    layer = Linear(3, {"q": 2, "k": 1}, bias=bias, dtype=torch.float32)
    slots = layer.weight_slots()
    slots["q.weight"].copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]))
    slots["k.weight"].copy_(torch.tensor([[-1.0, 0.0, 1.0]]))
    if bias:
        slots["q.bias"].copy_(torch.tensor([10.0, 20.0]))
        slots["k.bias"].fill_(30.0)
    layer.process_weights_after_loading()
    return layer


def test_shards_are_stacked_in_their_order():
    x = torch.tensor([[1.0, 1.0, 2.0]])
    assert filled(bias=False)(x).tolist() == [[9.0, 1.0, 1.0]]
    assert filled(bias=True)(x).tolist() == [[19.0, 21.0, 31.0]]


def test_slots_are_named_after_the_checkpoint():
    layer = Linear(3, {"q": 2, "k": 1}, bias=True, dtype=torch.float32)
    shapes = {name: tuple(slot.shape) for name, slot in layer.weight_slots().items()}
    assert shapes == {
        "q.weight": (2, 3),
        "k.weight": (1, 3),
        "q.bias": (2,),
        "k.bias": (1,),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tied_weight_has_no_slot_and_stays_as_it_is(dtype):
    table = VocabEmbedding(4, 3, "embed_tokens", dtype)
    table.weight_slots()["embed_tokens.weight"].copy_(torch.eye(4, 3, dtype=dtype))
    layer = Linear(3, {"lm_head": 4}, bias=False, dtype=dtype, tied_embedding=table)
    assert layer.weight_slots() == {}
    layer.process_weights_after_loading()
    assert torch.equal(table.weight, torch.eye(4, 3, dtype=dtype))
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    assert layer(x).tolist() == [[1.0, 2.0, 3.0, 0.0]]
