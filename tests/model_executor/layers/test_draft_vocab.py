import pytest
import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.draft_vocab import DraftVocab


def filled(d2t: list[int], t2d: list[bool]) -> DraftVocab:
    vocab = DraftVocab(len(d2t), len(t2d))
    slots = vocab.weight_slots()
    slots["d2t"].copy_(torch.tensor(d2t))
    slots["t2d"].copy_(torch.tensor(t2d))
    vocab.process_weights_after_loading()
    return vocab


def test_offsets_are_added_to_draft_ids():
    vocab = filled([1, 2, 2], [False, True, False, True, True])
    assert vocab.map_ids(torch.tensor([[0, 2], [1, 1]])).tolist() == [[1, 4], [3, 3]]


@pytest.mark.parametrize("d2t", [[1, 3], [3, 0], [0, 2]])
def test_tables_that_disagree_are_refused(d2t):
    with pytest.raises(CheckpointError, match="d2t"):
        filled(d2t, [False, True, False, True])
