"""Recovery: after a failure in mid-step every request is in exactly one queue again, and every refcount is right.

The scheduler, the block pool and the parts that they call are pluggable, and can fail between any two lines. So recovery
compares queues and tables as they are, and relies on no code that has failed:

    a request in no queue, or in one that its status doesn't name      → waiting, without KV
    a table whose blocks the pool failed to free                       → kept, counted, freed by a later step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from labcore.kvcache.blocks import BlockTable
from labcore.request import Request, RequestStatus
from labcore.scheduler.scheduler import Scheduler


class Recovery:
    """Repairs a scheduler's queues and tables. unfreed: tables without a request, whose blocks the pool has failed to free."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.unfreed: list[BlockTable] = []

    def roll_back(self, interrupted: Sequence[Request], known: Iterable[Request]) -> None:
        """Move the interrupted requests to the waiting queue, without KV, and with them any that is misplaced.

        known: every unfinished request. Raises nothing: if the scheduler's own `roll_back` fails, the rest is done here.
        """
        with suppress(Exception):
            self.scheduler.roll_back(interrupted)
        still_running = {id(request) for request in interrupted if request.status is RequestStatus.RUNNING}
        misplaced = self._misplaced(known)
        for request in known:
            if id(request) in misplaced | still_running:
                request.num_preemptions += request.status is RequestStatus.RUNNING
                self.take_out(request)
                self.scheduler.waiting.push(request)

    def retire(self, request: Request) -> None:
        """Take a finished request out of the scheduler. It is out even if this raises what the scheduler raised."""
        try:
            if request.table is not None:  # it is None if `Scheduler.add` has failed
                self.scheduler.finish(request)
        except BaseException:
            self.take_out(request)
            request.status = RequestStatus.FINISHED
            raise

    def take_out(self, request: Request) -> None:
        """Take a request out of every queue, and free its blocks. It is WAITING, and in no queue."""
        scheduler = self.scheduler
        scheduler.running[:] = [running for running in scheduler.running if running is not request]
        scheduler.waiting.discard(request)
        scheduler.drop_sibling(request)
        if request.table is not None:
            self.unfreed.append(request.table)
            self.free_tables()
        scheduler.kv.open_table(request)
        request.status = RequestStatus.WAITING

    def free_tables(self) -> None:
        """Free the tables that the pool has failed to free. Those that fail again are kept for the next step."""
        tables, self.unfreed = self.unfreed, []
        for table in tables:
            try:
                table.free()
            except Exception:
                self.unfreed.append(table)

    def _misplaced(self, known: Iterable[Request]) -> set[int]:
        """ids of the requests that are not in exactly the queue that their status names, or wait with blocks."""
        scheduler, misplaced = self.scheduler, set()
        running = Counter(map(id, scheduler.running))
        waiting = Counter(map(id, scheduler.waiting_requests()))
        for request in known:
            places = running[id(request)], waiting[id(request)]
            holds_blocks = request.status is RequestStatus.WAITING and bool(request.table.blocks)
            if holds_blocks or places != ((1, 0) if request.status is RequestStatus.RUNNING else (0, 1)):
                misplaced.add(id(request))
        return misplaced
