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

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.kvcache.prefix import PrefixCache
from labcore.request import Request, RequestStatus
from labcore.scheduler.chunking import ChunkPolicy
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.policy import Policy
from labcore.scheduler.preemption import Preemption, Recompute
from labcore.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Keeps every unfinished request in exactly one place, and plans one step at a time.

    The places are `waiting`, `running` (both by entitlement), and `followers`, who wait for their leader's prompt.

    pool             block pool that the tables of running requests draw from
    max_num_seqs     most requests running at once
    max_num_batched_tokens   token budget of a step
    watermark        free blocks that an admission leaves for each request that runs then. With 1 there are enough for
                     all of them for the next block_size steps: nobody is let in only to be pushed out again
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
        policy: Policy,
        watermark: int = 1,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunking = chunking
        self.prefix_cache = prefix_cache
        self.preemption = preemption
        self.policy = policy
        self.watermark = watermark
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.followers: dict[str, Request] = {}
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._step = 0

    def add(self, request: Request, followers: Sequence[Request] = ()) -> None:
        """Queue a request. Whether it can ever fit was checked before (`Engine.add_request`).

        followers: requests with the same prompt. They stand aside until it is computed, and then `follow`.
        """
        for newcomer in (request, *followers):
            newcomer.table = BlockTable(self.pool)
            newcomer.arrival_step = self._step
            newcomer.status = RequestStatus.WAITING
        self.waiting.push(request)
        self.followers.update((follower.request_id, follower) for follower in followers)

    def follow(self, follower: Request, leader: Request) -> None:
        """The leader's prompt is computed: the follower shares its blocks, the partly filled one too."""
        del self.followers[follower.request_id]
        self.fork(follower, leader)

    def fork(self, child: Request, parent: Request) -> None:
        """The child begins with the parent's tokens, owns its blocks as well, and runs beside it if a slot is free.

        A parent without KV, or a batch without a slot, has the child queue and compute its tokens, or find them cached.
        """
        if parent.status is not RequestStatus.RUNNING or len(self.running) == self.max_num_seqs:
            child.table = BlockTable(self.pool)
            child.status = RequestStatus.WAITING
            self.waiting.push(child)
            return
        child.table = parent.table.fork()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        child.prefix_chain = list(parent.prefix_chain)
        self._run(child)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever it is doing, and give its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif self.followers.pop(request.request_id, None) is None:
            self.waiting.discard(request)
        request.table.free()
        request.status = RequestStatus.FINISHED

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and reserve its blocks. At least one request moves whenever one is unfinished."""
        self._step += 1
        plan = SchedulerOutput(self._step)
        self.chunking.begin_step()
        budget = self._let_an_urgent_one_in(plan, self.max_num_batched_tokens)
        budget = self._schedule_running(plan, budget)
        if not plan.preempted:  # what was just taken from one request must not go to a newcomer
            self._schedule_waiting(plan, budget)
        if not plan.num_scheduled_tokens:
            self._end_a_standstill(plan)
        return plan

    def computed(self, request: Request, num_tokens: int) -> None:
        """The step is done: `num_tokens` more tokens of the request have their KV."""
        request.num_computed_tokens += num_tokens
        self.prefix_cache.publish(request)

    def roll_back(self, requests: Sequence[Request]) -> None:
        """A step broke off, and the KV of these requests may be half written: they lose it, and wait for their turn."""
        for request in requests:
            self._leave(request)
            Recompute().preempt(request, SchedulerOutput(self._step))
            request.num_preemptions += 1
            self.waiting.push(request)

    def _let_an_urgent_one_in(self, plan: SchedulerOutput, budget: int) -> int:
        """Preempt lower-priority running requests if that admits the head of the waiting queue. Returns the budget left.

        Requests that it may not preempt lose nothing to it: those before it take their tokens and blocks for this step
        first, and what the others still need stays reserved. So nothing is preempted in vain: the head computes tokens in
        this very step, and keeps its blocks. One a step: a burst of urgent requests must not empty the batch at once.
        """
        urgent = self.waiting.peek() if self.waiting else None
        if urgent is None or not any(self.policy.outranks(urgent, request) for request in self.running):
            return budget
        budget = self._schedule_running(plan, budget, ahead_of=urgent)
        if plan.preempted:  # blocks are short already
            return budget
        cached = self.prefix_cache.match(urgent)
        victims = self._victims_for(urgent, cached)
        if victims is None:
            return budget
        decoding = self._num_decoding(self.running, plan) - self._num_decoding(victims, plan)
        n = self._first_tokens(urgent, cached, max(0, budget - decoding))
        if n == 0:
            return budget
        self.waiting.pop()
        self._join(urgent, cached)
        for victim in victims:
            self._preempt(victim, plan)
        self._reserve(urgent, n, plan)
        return budget - n

    def _victims_for(self, urgent: Request, cached: list[int]) -> list[Request] | None:
        """The requests to preempt so that the urgent one fits beside all that it may not preempt; None if it can't."""
        keeping, yielding = [], []
        for request in self.running:
            (yielding if self.policy.outranks(urgent, request) else keeping).append(request)
        missing = self._blocks_missing(urgent, cached) + self._blocks_spoken_for(keeping) - self.pool.num_free
        if missing > sum(len(request.table.blocks) for request in yielding):  # the cheap half of the answer first
            return None
        self.pool.touch(cached)  # what the urgent one has found doesn't come free when its other owners go
        try:
            return self._victims(urgent, missing)
        finally:
            self.pool.free(cached[::-1])

    def _victims(self, urgent: Request, missing: int) -> list[Request] | None:
        """The fewest requests, least entitled first, that give the urgent one a slot and `missing` more blocks, or None.

        Only requests that it outranks, wherever they stand: under aging the last one need not be among them. A block comes
        free with the last of its owners: continuations that share a prompt give it back together.
        """
        victims: list[Request] = []
        held: Counter[int] = Counter()
        slots = len(self.running) + 1 - self.max_num_seqs
        for request in reversed(self.running):
            if slots <= 0 and missing <= 0:
                break
            if not self.policy.outranks(urgent, request):
                continue
            victims.append(request)
            held.update(request.table.blocks)
            slots -= 1
            missing -= sum(held[block] == self.pool.refcount(block) for block in request.table.blocks)
        return victims if slots <= 0 and missing <= 0 else None

    def _schedule_running(self, plan: SchedulerOutput, budget: int, ahead_of: Request | None = None) -> int:
        """Serve the running requests in order of entitlement, and return what is left of the budget.

        Prefill leaves one token of budget for each decoding request, so decodes never stall.

        ahead_of: stop before the first request that this one outranks; the next call goes on behind the last one planned
        """
        served = [i for i, request in enumerate(self.running, 1) if request.request_id in plan.num_scheduled_tokens]
        i, num_preempted = served[-1] if served else 0, len(plan.preempted)
        decoding = self._num_decoding(self.running, plan)
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            if ahead_of is not None and self.policy.outranks(ahead_of, request):
                break
            decodes = request.num_uncomputed_tokens == 1
            decoding -= decodes
            room = budget if decodes else max(0, budget - decoding)
            n = self.chunking.num_tokens(request, room, self.max_num_batched_tokens)
            if request.table.blocks_needed(n) > self.pool.num_free:
                stays = self._make_room(i, n, plan)
                decoding = self._num_decoding(self.running[i + stays :], plan)
                if not stays:
                    continue
            if n > 0:
                self._reserve(request, n, plan)
                budget -= n
            i += 1
        if plan.num_scheduled_tokens or len(plan.preempted) == num_preempted:
            return budget
        return self._schedule_running(plan, budget)  # the tokens kept for those just preempted go to those before them

    def _make_room(self, i: int, n: int, plan: SchedulerOutput) -> bool:
        """Preempt from the end until the i-th running request has blocks for n tokens. Returns whether it still runs.

        If all requests behind it hold too few blocks, it is preempted itself, and they go on.
        """
        request = self.running[i]
        lacking = request.table.blocks_needed(n) - self.pool.num_free
        if lacking > sum(len(other.table.blocks) for other in self.running[i + 1 :]):
            self._preempt(request, plan)
        while request.status is RequestStatus.RUNNING and request.table.blocks_needed(n) > self.pool.num_free:
            self._preempt(self.running[-1], plan)
        return request.status is RequestStatus.RUNNING

    def _end_a_standstill(self, plan: SchedulerOutput) -> None:
        """Nobody who runs has anything to compute: they are beams, and each waits for a sibling that found no room.

        Who stands behind the first of the waiting makes room for it. Of the most entitled family nobody has to, and
        that one fits by itself (`Gate`); so a step always moves somebody.
        """
        entitlement = self.policy.entitlement
        while self.waiting and not plan.num_scheduled_tokens:
            self._schedule_waiting(plan, self.max_num_batched_tokens, careful=False)
            if plan.num_scheduled_tokens or not self.running:
                return
            if entitlement(self.running[-1]) < entitlement(self.waiting.peek()):
                return
            self._preempt(self.running[-1], plan)

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int, careful: bool = True) -> None:
        """Let requests in, in order, until one finds no room. careful leaves room for those who run to grow."""
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            newcomer = self.waiting.peek()
            cached = self.prefix_cache.match(newcomer)
            if not self._finds_room(newcomer, cached, careful):
                return
            n = self._first_tokens(newcomer, cached, budget)
            if n == 0:
                return
            self._join(self.waiting.pop(), cached)
            self._reserve(newcomer, n, plan)
            budget -= n

    def _finds_room(self, request: Request, cached: list[int], careful: bool = True) -> bool:
        """Whether the blocks that a waiting request will take are free, and not spoken for by those who run."""
        spoken_for = self._blocks_spoken_for(self.running) if careful else 0
        return self._blocks_missing(request, cached) <= self.pool.num_free - spoken_for

    def _first_tokens(self, request: Request, cached: list[int], budget: int) -> int:
        """Tokens that a waiting request would compute in this step; the `cached` blocks spare it the first ones."""
        request.num_computed_tokens = len(cached) * self.pool.block_size
        n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
        request.num_computed_tokens = 0
        return n

    def _blocks_missing(self, request: Request, cached: list[int]) -> int:
        """Free blocks that a waiting request will take for all of its tokens, of which `cached` hold the first.

        All of them, even if a step computes only some: one that is let in for its first piece alone would soon have to
        push others out, or be pushed. Cached blocks that running requests own are spared; one without an owner is free, and
        so counts as taken. Owners hold a text from its head on, so the first block without one ends the count.
        """
        in_use = sum(1 for _ in takewhile(self.pool.refcount, cached))
        return -(-request.num_tokens // self.pool.block_size) - in_use

    def _blocks_spoken_for(self, running: Sequence[Request]) -> int:
        """Free blocks reserved for these running requests: the rest of their prompts, and the watermark for each.

        The watermark counts for the request that joins them, too.
        """
        if not running:
            return 0
        size = self.pool.block_size
        unfinished_prompts = sum(-(-r.num_tokens // size) - len(r.table.blocks) for r in running)
        return unfinished_prompts + self.watermark * (len(running) + 1)

    def _num_decoding(self, requests: Sequence[Request], plan: SchedulerOutput) -> int:
        """How many of these requests decode and are not in the plan yet: each is owed a token of the budget."""
        planned = plan.num_scheduled_tokens
        return sum(request.num_uncomputed_tokens == 1 and request.request_id not in planned for request in requests)

    def _join(self, request: Request, cached: list[int]) -> None:
        """A waiting request runs from here on, and owns the blocks that the prefix cache found for it."""
        request.table.adopt(cached)
        request.num_computed_tokens = request.table.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens
        self._run(request)

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=self.policy.entitlement)

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
        """Send a running request back to its place in the queue. Its tokens stay, and so does its turn."""
        self._leave(request)
        self.preemption.preempt(request, plan)
        request.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(request.request_id)
        self.waiting.push(request)

    def _leave(self, request: Request) -> None:
        entitlement = self.policy.entitlement
        del self.running[bisect_left(self.running, entitlement(request), key=entitlement)]
