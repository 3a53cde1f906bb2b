"""The iteration-level scheduler: who computes how many tokens in this step. Built in notebook 04.

There is no prefill phase and no decode phase. Each step hands out a token budget: first to the running requests, most
entitled first, then to waiting ones while budget, sequence slots and blocks last. A running request that finds no
block takes one from the least entitled, who goes back to its place in the queue and loses nothing but time.

    step        1        2        3        4        5
    ana    ▓▓▓▓▓▓        ▒        ▒        ▒   leaves          ▓ prompt token computed
    bo        ▓▓▓        ▒   leaves                            ▒ output token computed
    cy     (waits)  ▓▓▓▓▓▓▓▓▓     ▒        ▒        ▒          joins the moment there is room

Source: Yu et al. 2022 (Orca), iteration-level scheduling; Kwon et al. 2023 (PagedAttention), preemption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from labcore.blocks import BlockPool, BlockTable
from labcore.chunking import ChunkPolicy
from labcore.prefix import PrefixCache
from labcore.request import Request, RequestStatus


@dataclass
class SchedulerOutput:
    """The plan of one step, as plain data. The order within a step is fixed: swaps in, block copies, forward, sample.

    num_scheduled_tokens   request id → tokens to compute, in batch order
    block_copies           (src, dst) blocks to copy before anything is written
    swaps_in, swaps_out    (host block, device block) and (device block, host block)
    preempted              ids of requests that were sent back to the queue
    """

    step: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes in all."""
        return sum(self.num_scheduled_tokens.values())


class Preemption(ABC):
    """What becomes of the KV of a request that has to make room."""

    @abstractmethod
    def preempt(self, request: Request, plan: SchedulerOutput) -> None:
        """Take every device block from the request, so that a later step can bring it back where it was."""


class Recompute(Preemption):
    """Drop the KV; the tokens stay, and are computed again when the request's turn comes."""

    def preempt(self, request: Request, plan: SchedulerOutput) -> None:
        request.table.free()
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING


def fcfs(request: Request) -> tuple:
    """First come, first served: entitled in order of arrival."""
    return (request.arrival,)


def by_priority(request: Request) -> tuple:
    """A smaller priority number first, equals in order of arrival."""
    return (request.priority, request.arrival)


POLICIES = {"fcfs": fcfs, "priority": by_priority}


class WaitingQueue:
    """Waiting requests, most entitled first. Push and pop cost O(log n); an aborted one is skipped when it surfaces."""

    def __init__(self, entitlement: Callable[[Request], tuple]) -> None:
        self._entitlement = entitlement
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


class Scheduler:
    """Keeps every unfinished request in exactly one of `waiting` and `running`, and plans one step at a time.

    pool             block pool that the tables of running requests draw from
    max_num_seqs     most requests running at once
    max_num_batched_tokens   token budget of a step
    policy           "fcfs" or "priority": who is more entitled, to a slot, to budget and to blocks
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunking: ChunkPolicy,
        prefix_cache: PrefixCache,
        preemption: Preemption,
        policy: str = "fcfs",
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunking = chunking
        self.prefix_cache = prefix_cache
        self.preemption = preemption
        self.entitlement = POLICIES[policy]
        self.waiting = WaitingQueue(self.entitlement)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._step = 0

    def add(self, request: Request) -> None:
        """Queue a request. Whether it can ever fit was checked before (`Engine.add_request`)."""
        request.table = BlockTable(self.pool)
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever it is doing, and give its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.discard(request)
        request.table.free()
        request.status = RequestStatus.FINISHED

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and reserve its blocks. At least one request moves whenever one is unfinished."""
        self._step += 1
        plan = SchedulerOutput(self._step)
        budget = self._schedule_running(plan, self.max_num_batched_tokens)
        if not plan.preempted:  # who has just taken blocks back must not hand them to a newcomer
            self._schedule_waiting(plan, budget)
        return plan

    def computed(self, request: Request, num_tokens: int) -> None:
        """The step is done: `num_tokens` more tokens of the request have their KV."""
        request.num_computed_tokens += num_tokens
        self.prefix_cache.publish(request)

    def roll_back(self, requests: Sequence[Request]) -> None:
        """A step broke off, and the KV of these requests may be half written: they lose it, and wait for their turn."""
        for request in requests:
            self.running.remove(request)
            Recompute().preempt(request, SchedulerOutput(self._step))
            request.num_preemptions += 1
            self.waiting.push(request)

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
            while request.table.blocks_needed(n) > self.pool.num_free:
                self._preempt(self.running[-1], plan)
                if request.status is not RequestStatus.RUNNING:
                    return budget
            if n > 0:
                self._reserve(request, n, plan)
                budget -= n
            i += 1
        return budget

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting.peek()
            n = self._admit(request, budget)
            if n == 0:
                return
            self.waiting.pop()
            insort(self.running, request, key=self.entitlement)
            self._reserve(request, n, plan)
            budget -= n

    def _admit(self, request: Request, budget: int) -> int:
        """Tokens that a waiting request may compute now. 0 changes nothing; else it holds its prefix and is RUNNING.

        All of its tokens must find room, even when only some are computed in this step: one that was let in for its
        first piece alone would soon be preempted, or preempt.
        """
        cached = self.prefix_cache.match(request)
        idle = sum(self.pool.refcount(block) == 0 for block in cached)
        missing = -(-request.num_tokens // self.pool.block_size) - len(cached)
        if missing + idle > self.pool.num_free:
            return 0
        request.num_computed_tokens = len(cached) * self.pool.block_size
        n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
        if n == 0:
            request.num_computed_tokens = 0
            return 0
        request.table.adopt(cached)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens
        request.status = RequestStatus.RUNNING
        return n

    def _reserve(self, request: Request, n: int, plan: SchedulerOutput) -> None:
        table = request.table
        copy = table.writable_tail()
        if copy is not None:
            plan.block_copies.append(copy)
            self.prefix_cache.forget([copy[1]])
        held = len(table.blocks)
        table.append(n)
        if len(table.blocks) > held:
            self.prefix_cache.forget(table.blocks[held:])
        plan.num_scheduled_tokens[request.request_id] = n

    def _preempt(self, request: Request, plan: SchedulerOutput) -> None:
        self.running.remove(request)
        self.preemption.preempt(request, plan)
        request.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(request.request_id)
        self.waiting.push(request)
