import pytest
import torch

from tests.model_executor.dspark_harness import CPU, make_config
from vllm._cpu_ops_drafter import ContextPiece
from vllm.model_executor.layers.context_kv import ContextKV, join_pieces
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


def piece(slots: list[int], first: int) -> ContextPiece:
    """Return tokens whose states and positions count up from `first`."""
    numbers = torch.arange(first, first + len(slots))
    taps = [numbers.float().unsqueeze(1) + 0.25 * i for i in range(2)]
    return ContextPiece(taps, numbers, torch.tensor(slots))


def test_joined_pieces_stand_in_their_order():
    joined = join_pieces([piece([8, 9], 0), piece([-1, 3], 10), piece([4], 20)])
    assert joined.positions.tolist() == [0, 1, 10, 11, 20]
    assert joined.slot_mapping.tolist() == [8, 9, -1, 3, 4]
    assert joined.taps[1].flatten().tolist() == [0.25, 1.25, 10.25, 11.25, 20.25]


def test_the_last_of_joined_tokens_at_a_slot_is_kept():
    joined = join_pieces([piece([8, 9, -1], 0), piece([9, -1], 10), piece([8, 9], 20)])
    assert joined.slot_mapping.tolist() == [-1, -1, -1, -1, -1, 8, 9]
