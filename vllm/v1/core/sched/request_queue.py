"""The requests that wait for a place in a step, in the order of a policy."""

import heapq
from collections.abc import Callable, Iterator

from vllm.v1.request import Request

_SortKey = tuple[float, ...]


def fcfs_key(request: Request) -> _SortKey:
    """First come, first served: a preempted request goes back to its old place."""
    return (request.arrival_index,)


def priority_key(request: Request) -> _SortKey:
    """Lower values first, then the earlier arrival."""
    return (request.priority, request.arrival_time, request.arrival_index)


_SORT_KEYS: dict[str, Callable[[Request], _SortKey]] = {
    "fcfs": fcfs_key,
    "priority": priority_key,
}


class RequestQueue:
    """A heap of requests; removing one from the middle is lazy.

    Args:
        policy: "fcfs" or "priority".
    """

    def __init__(self, policy: str) -> None:
        self.sort_key = _SORT_KEYS[policy]
        self._heap: list[tuple[_SortKey, str]] = []
        # The truth; heap entries of requests that have left are skipped.
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they would leave."""
        return iter(sorted(self._requests.values(), key=self.sort_key))

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        assert request.request_id not in self._requests, (
            f"request {request.request_id} waits twice"
        )
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (self.sort_key(request), request.request_id))

    def peek(self) -> Request:
        """Return the request that is next."""
        while True:
            key, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and self.sort_key(request) == key:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        """Take the request that is next."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; nothing happens if it is not there."""
        self._requests.pop(request.request_id, None)
        if not self._requests:
            self._heap.clear()
