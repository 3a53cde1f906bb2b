"""The waiting queue: a heap in the order of the scheduling policy. Built in notebook 04."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from labcore.request import Request
from labcore.scheduler.policy import Policy


class WaitingQueue:
    """Waiting requests, most entitled first.

    Push and pop cost O(log n). An aborted request is only crossed off: its heap entry is skipped when it surfaces, and
    dropped with all other such entries once they outnumber the live ones. So no list is searched, the heap is never more
    than twice as long as the queue, and `discard` costs O(1) amortised.
    """

    def __init__(self, policy: Policy) -> None:
        self._sort_key = policy.sort_key
        self._heap: list[tuple[tuple, Request]] = []
        self._present: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in the order in which they will be admitted. Sorts: for people, not for the hot path."""
        return iter(sorted(self._present.values(), key=self._sort_key))

    def push(self, request: Request) -> None:
        self._present[request.request_id] = request
        heappush(self._heap, (self._sort_key(request), request))

    def peek(self) -> Request:
        while self._present.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heappop(self._heap)
        self.discard(request)
        return request

    def discard(self, request: Request) -> None:
        self._present.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._present):
            self._heap = [entry for entry in self._heap if self._present.get(entry[1].request_id) is entry[1]]
            heapify(self._heap)
