import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


def make_request(request_id: str, index: int, priority: int = 0, arrival: float = 0.0):
    request = Request(
        request_id, [1], SamplingParams(), priority=priority, arrival_time=arrival
    )
    request.arrival_index = index
    return request


def drain(queue: RequestQueue) -> str:
    return "".join(queue.pop().request_id for _ in range(len(queue)))


def test_fcfs_ignores_priority_and_clock():
    queue = RequestQueue("fcfs")
    for request in (make_request("a", 0, 5, 9.0), make_request("b", 1, 0, 1.0)):
        queue.add(request)
    assert drain(queue) == "ab"


def test_fcfs_puts_a_returning_request_back_in_its_place():
    queue = RequestQueue("fcfs")
    requests = {name: make_request(name, i) for i, name in enumerate("abc")}
    for name in "cba":
        queue.add(requests[name])
    first = queue.pop()
    queue.add(first)
    assert drain(queue) == "abc"


def test_priority_orders_by_value_then_arrival_then_index():
    queue = RequestQueue("priority")
    for request in (
        make_request("d", 0, 2, 0.0),
        make_request("c", 3, 1, 5.0),
        make_request("b", 2, 1, 5.0),
        make_request("a", 4, 1, 4.0),
    ):
        queue.add(request)
    assert [request.request_id for request in queue] == list("abcd")
    assert drain(queue) == "abcd"


def test_a_removed_request_does_not_come_out():
    queue = RequestQueue("fcfs")
    requests = [make_request(name, i) for i, name in enumerate("abc")]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.remove(requests[0])
    assert requests[0] not in queue
    assert len(queue) == 2
    assert queue.peek() is requests[1]
    assert drain(queue) == "bc"


def test_a_request_that_left_can_come_again():
    queue = RequestQueue("fcfs")
    early, late = make_request("a", 0), make_request("b", 1)
    queue.add(early)
    queue.add(late)
    queue.remove(early)
    # Another request under the old id: the old place is not its own.
    again = make_request("a", 2)
    queue.add(again)
    assert drain(queue) == "ba"


def test_a_request_cannot_wait_twice():
    queue = RequestQueue("fcfs")
    queue.add(make_request("a", 0))
    with pytest.raises(AssertionError, match="waits twice"):
        queue.add(make_request("a", 1))
