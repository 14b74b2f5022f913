import torch

from vllm._cpu_ops_drafter import ContextPiece
from vllm.v1.worker.gpu.spec_decode.dspark.context_queue import ContextQueue


def piece(num_tokens: int) -> ContextPiece:
    numbers = torch.arange(num_tokens)
    return ContextPiece([numbers.float().unsqueeze(1)], numbers, numbers)


def test_a_queue_is_full_with_its_last_token():
    queue = ContextQueue(4)
    for num_tokens, is_full in ((1, False), (2, False), (1, True), (2, True)):
        queue.add(piece(num_tokens))
        assert queue.is_full == is_full
    queue.take()
    assert not queue.is_full


def test_what_is_taken_is_what_was_added_in_its_order():
    queue, pieces = ContextQueue(16), [piece(2), piece(1), piece(3)]
    assert queue.take() == []
    for added in pieces:
        queue.add(added)
    assert queue.take() == pieces
    assert queue.take() == []
