"""The iteration-level scheduler: which request computes how many tokens in a step. Built in notebook 04.

There is no prefill phase and no decode phase. Each step hands out a token budget: first to the running requests, in the
order of the policy, then to waiting ones while budget, sequence slots and blocks last. A running request that finds no
free block preempts the last one in that order, which goes back to its place in the queue and keeps its tokens.

    step        1        2        3        4        5
    ana    ▓▓▓▓▓▓        ▒        ▒        ▒   finished        ▓ prompt token computed
    bo        ▓▓▓        ▒   finished                          ▒ output token computed
    cy   (waiting)  ▓▓▓▓▓▓▓▓▓     ▒        ▒        ▒          admitted as soon as it fits

Source: Yu et al. 2022 (Orca), iteration-level scheduling; Kwon et al. 2023 (PagedAttention), preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from labcore.kvcache.manager import KVCacheManager
from labcore.request import Request, RequestStatus
from labcore.scheduler.chunking import ChunkPolicy
from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.policy import Policy
from labcore.scheduler.preemption import Preemption, Recompute
from labcore.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Keeps every unfinished request in exactly one place, and plans one step at a time.

    The places are `waiting`, `running` (both in the order of the policy), and `pending_siblings`: requests whose prompt
    another request computes, by the id of that prompt owner.

    kv               block pool, prefix cache and block tables
    max_num_seqs     most requests running at once
    max_num_batched_tokens   token budget of a step, unless `schedule` is given another
    watermark        free blocks that an admission leaves for each request that runs then. 1 is enough for the next
                     block_size decode steps: no request is admitted only to be preempted at once
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunking: ChunkPolicy,
        preemption: Preemption,
        policy: Policy,
        watermark: int = 1,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunking = chunking
        self.preemption = preemption
        self.policy = policy
        self.watermark = watermark
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.pending_siblings: dict[str, dict[str, Request]] = {}
        self.num_preemptions = 0
        self._step = 0
        self._budget = max_num_batched_tokens

    def add(self, request: Request, siblings: Sequence[Request] = ()) -> None:
        """Queue a request. `RequestValidator` has checked that it fits into an empty pool.

        siblings: requests with the same prompt. They wait until this one has computed it, and begin with its blocks.
        """
        for newcomer in (request, *siblings):
            self.kv.open_table(newcomer)
            newcomer.arrival_step = self._step
            newcomer.status = RequestStatus.WAITING
        self.waiting.push(request)
        if siblings:
            self.pending_siblings[request.request_id] = {sibling.request_id: sibling for sibling in siblings}
        for sibling in siblings:
            sibling.prompt_owner = request.request_id

    def fork(self, child: Request, parent: Request) -> None:
        """The child begins with the parent's tokens, shares its blocks, and runs beside it if a slot is free.

        If the parent has no KV, or no slot is free, the child waits, and computes its tokens or finds them cached.
        """
        if parent.status is not RequestStatus.RUNNING or len(self.running) == self.max_num_seqs:
            self.kv.open_table(child)
            child.status = RequestStatus.WAITING
            self.waiting.push(child)
            return
        self.kv.share(child, parent)
        self._insert_running(child)

    def finish(self, request: Request) -> None:
        """Take a request out, running or waiting, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._remove_running(request)
        else:
            self.waiting.discard(request)
            self.drop_sibling(request)
        self.kv.free(request)
        request.status = RequestStatus.FINISHED

    def drop_sibling(self, request: Request) -> None:
        """Take a request out of `pending_siblings`, if it is there."""
        family = self.pending_siblings.get(request.prompt_owner, {})
        if family.get(request.request_id) is request:
            del family[request.request_id]
            if not family:
                del self.pending_siblings[request.prompt_owner]
        request.prompt_owner = None

    def waiting_requests(self) -> list[Request]:
        """All requests that don't run: the waiting queue in its order, then the pending siblings."""
        return [*self.waiting, *(sibling for family in self.pending_siblings.values() for sibling in family.values())]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self, budget: int | None = None) -> SchedulerOutput:
        """Plan the next step and reserve its blocks. At least one request moves whenever one is unfinished.

        budget: most tokens of this step; max_num_batched_tokens when None.
        """
        self._step += 1
        self._budget = budget = self.max_num_batched_tokens if budget is None else budget
        plan = SchedulerOutput(self._step)
        self.chunking.begin_step()
        budget = self._preempt_for_priority(plan, budget)
        budget = self._schedule_running(plan, budget)
        if not plan.preempted:  # blocks taken from one request must not go to a newcomer
            self._schedule_waiting(plan, budget)
        if not plan.num_scheduled_tokens:
            self._break_beam_deadlock(plan)
        return plan

    def commit(self, request: Request, num_tokens: int) -> None:
        """The step is done: `num_tokens` more tokens of the request have their KV. A complete prompt is shared."""
        self.kv.commit(request, num_tokens)
        siblings = self.pending_siblings.get(request.request_id)
        if siblings and request.num_uncomputed_tokens == 0:
            for sibling in list(siblings.values()):
                self.share_prompt(sibling, request)

    def share_prompt(self, sibling: Request, owner: Request) -> None:
        """The owner's prompt is computed: the sibling shares its blocks, the partly filled one too."""
        self.drop_sibling(sibling)
        self.fork(sibling, owner)

    def roll_back(self, requests: Sequence[Request]) -> None:
        """A step failed, and the KV of these requests may be half written: they lose it, and wait for their turn."""
        for request in requests:
            self._remove_running(request)
            Recompute().preempt(request, self.kv, SchedulerOutput(self._step))
            request.num_preemptions += 1
            self.waiting.push(request)

    def _preempt_for_priority(self, plan: SchedulerOutput, budget: int) -> int:
        """Preempt lower-priority running requests if that admits the head of the waiting queue. Returns the budget left.

        Requests that it may not preempt lose nothing: those before it get their tokens and blocks of this step first, and
        what the others still need stays reserved. So no preemption is in vain: the head computes tokens in this very step,
        and keeps its blocks. One admission a step: a burst of urgent requests must not empty the batch at once.
        """
        urgent = self.waiting.peek() if self.waiting else None
        if urgent is None or not any(self.policy.can_preempt(urgent, request) for request in self.running):
            return budget
        budget = self._schedule_running(plan, budget, ahead_of=urgent)
        if plan.preempted:  # blocks are short already
            return budget
        cached = self.kv.match(urgent)
        victims = self._victims_for(urgent, cached)
        if victims is None:
            return budget
        decoding = self._num_decoding(self.running, plan) - self._num_decoding(victims, plan)
        n = self._first_chunk(urgent, cached, max(0, budget - decoding))
        if n == 0:
            return budget
        self.waiting.pop()
        self._admit(urgent, cached)
        for victim in victims:
            self._preempt(victim, plan)
        self._reserve(urgent, n, plan)
        return budget - n

    def _victims_for(self, urgent: Request, cached: list[int]) -> list[Request] | None:
        """The requests to preempt so that the urgent one fits beside all that it may not preempt; None if it can't."""
        protected, preemptible = [], []
        for request in self.running:
            (preemptible if self.policy.can_preempt(urgent, request) else protected).append(request)
        missing = self.kv.blocks_missing(urgent, cached) + self._reserved_blocks(protected) - self.kv.pool.num_free
        if missing > sum(len(request.table.blocks) for request in preemptible):  # the cheap half of the answer first
            return None
        urgent.table.attach_prefix(cached)  # a block that it has found doesn't come free with its other owners
        try:
            return self._victims(urgent, missing)
        finally:
            self.kv.free(urgent)

    def _victims(self, urgent: Request, missing: int) -> list[Request] | None:
        """The fewest requests, last in order first, that give the urgent one a slot and `missing` more blocks, or None.

        Only requests that it can preempt, wherever they stand: under aging the last one need not be among them. A block
        comes free with the last of its owners: samples that share a prompt free it together.
        """
        victims: list[Request] = []
        held: Counter[int] = Counter()
        slots = len(self.running) + 1 - self.max_num_seqs
        for request in reversed(self.running):
            if slots <= 0 and missing <= 0:
                break
            if not self.policy.can_preempt(urgent, request):
                continue
            victims.append(request)
            held.update(request.table.blocks)
            slots -= 1
            missing -= sum(held[block] == self.kv.pool.refcount(block) for block in request.table.blocks)
        return victims if slots <= 0 and missing <= 0 else None

    def _schedule_running(self, plan: SchedulerOutput, budget: int, ahead_of: Request | None = None) -> int:
        """Schedule the running requests in order, and return what is left of the budget.

        Prefill leaves one token of budget for each decoding request, so decodes never stall.

        ahead_of: stop before the first request that this one can preempt; the next call goes on behind the last one planned
        """
        planned = [i for i, request in enumerate(self.running, 1) if request.request_id in plan.num_scheduled_tokens]
        i, num_preempted = planned[-1] if planned else 0, len(plan.preempted)
        decoding = self._num_decoding(self.running, plan)
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            if ahead_of is not None and self.policy.can_preempt(ahead_of, request):
                break
            decodes = request.num_uncomputed_tokens == 1
            decoding -= decodes
            room = budget if decodes else max(0, budget - decoding)
            n = self.chunking.num_tokens(request, room, self._budget)
            if not self.kv.fits(request, n):
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
        return self._schedule_running(plan, budget)  # the budget kept for the preempted goes to those before them

    def _make_room(self, i: int, n: int, plan: SchedulerOutput) -> bool:
        """Preempt from the end until the i-th running request has blocks for n tokens. Returns whether it still runs.

        If all requests behind it hold too few blocks, it is preempted itself, and they go on.
        """
        request = self.running[i]
        lacking = request.table.blocks_needed(n) - self.kv.pool.num_free
        if lacking > sum(len(other.table.blocks) for other in self.running[i + 1 :]):
            self._preempt(request, plan)
        while request.status is RequestStatus.RUNNING and not self.kv.fits(request, n):
            self._preempt(self.running[-1], plan)
        return request.status is RequestStatus.RUNNING

    def _break_beam_deadlock(self, plan: SchedulerOutput) -> None:
        """No running request has tokens to compute: each is a beam that waits for a preempted sibling.

        Running requests behind the head of the waiting queue are preempted until it fits. The first search in order is
        never preempted here, and fits by itself (`RequestValidator`), so every step computes tokens.
        """
        sort_key = self.policy.sort_key
        while self.waiting and not plan.num_scheduled_tokens:
            self._schedule_waiting(plan, self._budget, keep_watermark=False)
            if plan.num_scheduled_tokens or not self.running:
                return
            if sort_key(self.running[-1]) < sort_key(self.waiting.peek()):
                return
            self._preempt(self.running[-1], plan)

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int, keep_watermark: bool = True) -> None:
        """Admit waiting requests in order, until one doesn't fit. keep_watermark leaves blocks for running ones to grow."""
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            newcomer = self.waiting.peek()
            cached = self.kv.match(newcomer)
            if not self._can_admit(newcomer, cached, keep_watermark):
                return
            n = self._first_chunk(newcomer, cached, budget)
            if n == 0:
                return
            self._admit(self.waiting.pop(), cached)
            self._reserve(newcomer, n, plan)
            budget -= n

    def _can_admit(self, request: Request, cached: list[int], keep_watermark: bool = True) -> bool:
        """Whether the blocks that a waiting request needs are free beyond what running requests have reserved.

        All of its blocks, even if a step computes only some of its tokens: admitted for its first chunk alone, it would
        soon preempt others, or be preempted.
        """
        reserved = self._reserved_blocks(self.running) if keep_watermark else 0
        return self.kv.blocks_missing(request, cached) <= self.kv.pool.num_free - reserved

    def _first_chunk(self, request: Request, cached: list[int], budget: int) -> int:
        """Tokens that a waiting request would compute in this step, behind those that the `cached` blocks hold."""
        request.num_computed_tokens = len(cached) * self.kv.pool.block_size
        n = self.chunking.num_tokens(request, budget, self._budget)
        request.num_computed_tokens = 0
        return n

    def _reserved_blocks(self, running: Sequence[Request]) -> int:
        """Free blocks reserved for these running requests: the rest of their prompts, and the watermark for each.

        The watermark is counted for the request to be admitted, too.
        """
        if not running:
            return 0
        size = self.kv.pool.block_size
        unfinished_prompts = sum(-(-r.num_tokens // size) - len(r.table.blocks) for r in running)
        return unfinished_prompts + self.watermark * (len(running) + 1)

    def _num_decoding(self, requests: Sequence[Request], plan: SchedulerOutput) -> int:
        """How many of these requests decode and are not planned yet: each needs a token of the budget."""
        planned = plan.num_scheduled_tokens
        return sum(request.num_uncomputed_tokens == 1 and request.request_id not in planned for request in requests)

    def _admit(self, request: Request, cached: list[int]) -> None:
        """A waiting request runs from here on, and owns the blocks of its cached prefix."""
        self.kv.attach(request, cached)
        self._insert_running(request)

    def _reserve(self, request: Request, n: int, plan: SchedulerOutput) -> None:
        """Plan n tokens of a running request, with their blocks. Pending siblings sample from the logits of its prompt."""
        copy = self.kv.reserve(request, n)
        if copy is not None:
            plan.block_copies.append(copy)
        plan.num_scheduled_tokens[request.request_id] = n
        siblings = self.pending_siblings.get(request.request_id)
        if siblings and n == request.num_uncomputed_tokens:
            plan.siblings[request.request_id] = list(siblings)

    def _preempt(self, request: Request, plan: SchedulerOutput) -> None:
        """Send a running request back to its place in the waiting queue. It keeps its tokens."""
        self._remove_running(request)
        self.preemption.preempt(request, self.kv, plan)
        request.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(request.request_id)
        self.waiting.push(request)

    def _insert_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=self.policy.sort_key)

    def _remove_running(self, request: Request) -> None:
        sort_key = self.policy.sort_key
        del self.running[bisect_left(self.running, sort_key(request), key=sort_key)]
