"""The waiting queue: a heap in the order of the scheduling policy. Built in notebook 04."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from labcore.request import Request
from labcore.scheduler.policy import Policy


class WaitingQueue:
    """Waiting requests, most entitled first.

    Push and pop cost O(log n), and an aborted request is skipped when it surfaces: no list is ever searched.
    """

    def __init__(self, policy: Policy) -> None:
        self._entitlement = policy.entitlement
        self._heap: list[tuple[tuple, Request]] = []
        self._present: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in the order in which they will be admitted. Sorts: for people, not for the hot path."""
        return iter(sorted(self._present.values(), key=self._entitlement))

    def push(self, request: Request) -> None:
        self._present[request.request_id] = request
        heappush(self._heap, (self._entitlement(request), request))

    def peek(self) -> Request:
        while self._present.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heappop(self._heap)
        del self._present[request.request_id]
        return request

    def discard(self, request: Request) -> None:
        self._present.pop(request.request_id, None)
