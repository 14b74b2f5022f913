import torch

from vllm.v1.worker.gpu.spec_decode.dspark.context_queue import Context, ContextQueue


def tokens(slots: list[int], first: int) -> Context:
    """Return tokens whose states and positions count up from `first`."""
    numbers = torch.arange(first, first + len(slots))
    taps = [numbers.float().unsqueeze(1) + 0.25 * i for i in range(2)]
    return Context(taps, numbers, torch.tensor(slots))


def test_a_queue_is_full_with_its_last_token():
    queue = ContextQueue(4)
    assert queue.is_empty
    for first, is_full in ((0, False), (2, True), (4, True)):
        queue.add(tokens([first, first + 1], first))
        assert queue.is_full == is_full
    assert not queue.is_empty
    queue.take()
    assert queue.is_empty
    assert not queue.is_full


def test_what_is_taken_is_what_was_added_in_its_order():
    queue = ContextQueue(16)
    for slots, first in (([8, 9], 0), ([-1, 3], 10), ([4], 20)):
        queue.add(tokens(slots, first))
    taken = queue.take()
    assert taken.positions.tolist() == [0, 1, 10, 11, 20]
    assert taken.slot_mapping.tolist() == [8, 9, -1, 3, 4]
    assert taken.taps[1].flatten().tolist() == [0.25, 1.25, 10.25, 11.25, 20.25]
    queue.add(tokens([7], 5))
    assert queue.take().positions.tolist() == [5]


def test_the_last_token_of_a_slot_is_written():
    queue = ContextQueue(16)
    for slots, first in (([8, 9, -1], 0), ([9, -1], 10), ([8, 9], 20)):
        queue.add(tokens(slots, first))
    assert queue.take().slot_mapping.tolist() == [-1, -1, -1, -1, -1, 8, 9]
