"""Right and wrong answers to the exercises of notebook 04: what the checks must accept and must refuse."""

from __future__ import annotations

from collections import Counter
from heapq import heappop

from labcore.course.exercises.nb04 import MendedScheduler
from labcore.course.exercises.nb04_planted import CopyingScheduler
from labcore.request import RequestStatus
from labcore.scheduler.policy import PriorityWithAging
from labcore.scheduler.scheduler import Scheduler
from labcore.scheduler.waiting_queue import WaitingQueue


class QueueByPopping(WaitingQueue):
    """Takes the first entry out and puts it back, rather than looking at it."""

    def peek(self):
        request = self.pop()
        self.push(request)
        return request

    def pop(self):
        while True:
            _, request = heappop(self._heap)
            if self._present.get(request.request_id) is request:
                return self._present.pop(request.request_id)


class PopsTheLast(WaitingQueue):
    def peek(self):
        return self._heap[-1][1]


class ForgetsWhoHungUp(WaitingQueue):
    def peek(self):
        return self._heap[0][1]


class GoesByTheName(WaitingQueue):
    def peek(self):
        while self._heap[0][1].request_id not in self._present:
            heappop(self._heap)
        return self._heap[0][1]


class TakesWhenItLooks(WaitingQueue):
    def peek(self):
        return QueueByPopping.pop(self)


class LeavesItPresent(WaitingQueue):
    def pop(self):
        request = self.peek()
        heappop(self._heap)
        return request


class LeavesItInTheHeap(WaitingQueue):
    """Its entry is thrown away when it surfaces, like those of people who hung up."""

    def pop(self):
        request = self.peek()
        del self._present[request.request_id]
        return request


class SortsEveryTime(WaitingQueue):
    def peek(self):
        return next(iter(self))

    def pop(self):
        request = self.peek()
        self.discard(request)
        return request


class AdmitsByBreaking(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        while True:
            if len(self.waiting) == 0 or len(self.running) >= self.max_num_seqs or budget <= 0:
                break
            request = self.waiting.peek()
            found = self.kv.match(request)
            n = self._first_chunk(request, found, budget) if self._can_admit(request, found, keep_watermark) else 0
            if not n:
                break
            self.waiting.pop()
            self._admit(request, found)
            self._reserve(request, n, plan)
            budget = budget - n


class ForgetsTheSeats(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        kept, self.max_num_seqs = self.max_num_seqs, 10**6
        super()._schedule_waiting(plan, budget, keep_watermark)
        self.max_num_seqs = kept


class ForgetsTheBudget(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            n = self._first_chunk(request, [], budget)
            if n == 0 or not self._can_admit(request, [], keep_watermark):
                return
            self._admit(self.waiting.pop(), [])
            self._reserve(request, n, plan)


class LetsTheSmallOvertake(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        for request in list(self.waiting):
            n = self._first_chunk(request, [], budget) if budget > 0 else 0
            if n == 0 or len(self.running) == self.max_num_seqs or not self._can_admit(request, [], keep_watermark):
                continue
            self.waiting.discard(request)
            self._admit(request, [])
            self._reserve(request, n, plan)
            budget -= n


class TakesBeforeItLooks(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting.pop()
            if not self._can_admit(request, [], keep_watermark):
                return
            n = self._first_chunk(request, [], budget)
            if n == 0:
                return
            self._admit(request, [])
            self._reserve(request, n, plan)
            budget -= n


class ForgetsToReserve(Scheduler):
    def _reserve(self, request, n, plan):
        plan.num_scheduled_tokens[request.request_id] = n


class NeverCareful(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        super()._schedule_waiting(plan, budget, keep_watermark=False)


class AlwaysCareful(Scheduler):
    def _schedule_waiting(self, plan, budget, keep_watermark=True):
        super()._schedule_waiting(plan, budget)


class AgingInNumbers(PriorityWithAging):
    """The same order, measured in numbers of priority rather than in steps."""

    def sort_key(self, request):
        return (request.priority + request.arrival_step / self.aging, request.arrival, request.beam_id)

    def can_preempt(self, waiting, running):
        if waiting.priority >= running.priority:
            return False
        return self.sort_key(waiting) < self.sort_key(running)


class NeverAges(PriorityWithAging):
    def sort_key(self, request):
        return (request.priority, request.arrival, request.beam_id)


class AgesTheWrongWay(PriorityWithAging):
    def sort_key(self, request):
        return (request.priority * self.aging - request.arrival_step, request.arrival, request.beam_id)


class LargerFirst(PriorityWithAging):
    def sort_key(self, request):
        return (-request.priority * self.aging + request.arrival_step, request.arrival, request.beam_id)


class ForgetsWhoCameFirst(PriorityWithAging):
    def sort_key(self, request):
        return (request.priority * self.aging + request.arrival_step,)


class AgesByTheToken(PriorityWithAging):
    def sort_key(self, request):
        aged = request.priority * self.aging + request.arrival_step
        return (aged - len(request.output_token_ids), request.arrival, request.beam_id)


class LetsEqualsSwing(PriorityWithAging):
    def can_preempt(self, waiting, running):
        return self.sort_key(waiting) < self.sort_key(running)


class ThrowsTheAgedOut(PriorityWithAging):
    def can_preempt(self, waiting, running):
        return waiting.priority < running.priority


class VictimsByIndex(Scheduler):
    def _victims(self, urgent, missing):
        below = [request for request in self.running[::-1] if self.policy.can_preempt(urgent, request)]
        seats, count, going = self.max_num_seqs - len(self.running), 0, []
        while seats < 1 or missing > 0:
            if count == len(below):
                return None
            seats += 1
            own = below[count].table.blocks
            going += own
            missing -= len([block for block in own if going.count(block) == self.kv.pool.refcount(block)])
            count += 1
        return below[:count]


class StopsAtTheFirstItMayNotTake(Scheduler):
    """The end of the list need not be whom it outranks: who came late and is urgent stands there."""

    def _victims(self, urgent, missing):
        victims, held, slots = [], Counter(), len(self.running) + 1 - self.max_num_seqs
        for request in reversed(self.running):
            if (slots <= 0 and missing <= 0) or not self.policy.can_preempt(urgent, request):
                break
            victims.append(request)
            held.update(request.table.blocks)
            slots -= 1
            missing -= sum(held[block] == self.kv.pool.refcount(block) for block in request.table.blocks)
        return victims if slots <= 0 and missing <= 0 else None


class TakesTheMostEntitled(Scheduler):
    def _victims(self, urgent, missing):
        kept, self.running = self.running, self.running[::-1]
        victims = super()._victims(urgent, missing)
        self.running = kept
        return victims


class TakesEverybody(Scheduler):
    def _victims(self, urgent, missing):
        return [request for request in reversed(self.running) if self.policy.can_preempt(urgent, request)]


class LooksAtSeatsOnly(Scheduler):
    def _victims(self, urgent, missing):
        return super()._victims(urgent, 0)


class AlwaysOne(Scheduler):
    def _victims(self, urgent, missing):
        if self.policy.can_preempt(urgent, self.running[-1]):
            return [self.running[-1]]
        return None


class SacrificesInVain(Scheduler):
    def _victims(self, urgent, missing):
        return super()._victims(urgent, missing) or TakesEverybody._victims(self, urgent, missing)


class CountsSharedBlocks(Scheduler):
    def _victims(self, urgent, missing):
        victims, slots = [], len(self.running) + 1 - self.max_num_seqs
        for request in reversed(self.running):
            if (slots <= 0 and missing <= 0) or not self.policy.can_preempt(urgent, request):
                break
            victims.append(request)
            slots, missing = slots - 1, missing - sum(map(self.comes_free, request.table.blocks))
        return victims if slots <= 0 and missing <= 0 else None

    def comes_free(self, block):
        return True


class CountsBlocksOfOneOwnerOnly(CountsSharedBlocks):
    def comes_free(self, block):
        return self.kv.pool.is_writable(block)


class AsksNobodysRank(Scheduler):
    def _victims(self, urgent, missing):
        victims, slots = [], len(self.running) + 1 - self.max_num_seqs
        for request in reversed(self.running):
            if slots <= 0 and missing <= 0:
                break
            victims.append(request)
            slots, missing = slots - 1, missing - sum(map(self.kv.pool.is_writable, request.table.blocks))
        return victims if slots <= 0 and missing <= 0 else None


class PushesThemOutAtOnce(Scheduler):
    def _victims(self, urgent, missing):
        victims = super()._victims(urgent, missing)
        for victim in victims or []:
            self._remove_running(victim)
        return victims


class WalksByIndex(CopyingScheduler):
    def _schedule_running(self, plan, budget):
        i = 0
        while i < len(self.running):
            request = self.running[i]
            n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
            while request.status is RequestStatus.RUNNING and request.table.blocks_needed(n) > self.kv.pool.num_free:
                self._preempt(self.running[-1], plan)
            if request.status is RequestStatus.RUNNING and n > 0:
                self._reserve(request, n, plan)
                budget -= n
            i += 1
        return budget


class AsksOnlyAtTheHead(CopyingScheduler):
    """Passes victims over, and doesn't see that the last one may be the one who asks."""

    def _schedule_running(self, plan, budget):
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue
            n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
            while request.table.blocks_needed(n) > self.kv.pool.num_free:
                self._preempt(self.running[-1], plan)
            self._reserve(request, n, plan)
            budget -= n
        return budget


class StopsAtTheFirstVictim(CopyingScheduler):
    """One preemption, and the step is over for everybody: those who are left stand still."""

    def _schedule_running(self, plan, budget):
        for request in list(self.running):
            n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
            if request.table.blocks_needed(n) > self.kv.pool.num_free:
                self._preempt(self.running[-1], plan)
                return budget
            self._reserve(request, n, plan)
            budget -= n
        return budget


class PushesEverybodyOut(CopyingScheduler):
    def _schedule_running(self, plan, budget):
        needed = sum(request.table.blocks_needed(request.num_uncomputed_tokens) for request in self.running)
        if needed > self.kv.pool.num_free:
            for request in list(self.running):
                self._preempt(request, plan)
        for request in self.running:
            self._reserve(request, request.num_uncomputed_tokens, plan)
        return budget


RIGHT = {
    "04.queue": [WaitingQueue, QueueByPopping, LeavesItInTheHeap],
    "04.admission": [Scheduler, AdmitsByBreaking],
    "04.aging": [PriorityWithAging, AgingInNumbers],
    "04.victims": [Scheduler, VictimsByIndex],
    "04.saved_list": [MendedScheduler, WalksByIndex],
}

WRONG = {
    "04.queue": [
        (PopsTheLast, "peek(). expected 'ana', got"),
        (ForgetsWhoHungUp, "Ana was popped, Bo hung up; peek(). expected 'cy', got 'bo'"),
        (GoesByTheName, "another Cy; pop(). expected 'di', got 'cy'"),
        (TakesWhenItLooks, "len(queue) after peek(). expected 3, got 2"),
        (LeavesItPresent, "len(queue) after pop(). expected 2, got 3"),
        (SortsEveryTime, "500 of 1,000 were popped, and the policy was asked for"),
    ],
    "04.admission": [
        (ForgetsTheSeats, "Ana, Bo and Cy wait, and there are 2 seats: those in the plan"),
        (ForgetsTheBudget, "18 tokens are in the plan. expected 12 at most"),
        (LetsTheSmallOvertake, "Bo's prompt is too long for what Ana leaves: those in the plan. expected ['ana'], got"),
        (TakesBeforeItLooks, "those who still wait. expected ['cy'], got []"),
        (ForgetsToReserve, "blocks taken. expected 6, got 0"),
        (NeverCareful, "one block for each of the two is to be left: those in the plan. expected ['ana']"),
        (AlwaysCareful, "keep_watermark is False: the watermark is not asked"),
    ],
    "04.aging": [
        (NeverAges, "priority 1 came 11 steps before priority 0, and aging is 10"),
        (AgesTheWrongWay, "priority 1 came 11 steps before priority 0, and aging is 10"),
        (LargerFirst, "priority 0 and priority 1 arrived in the same step"),
        (ForgetsWhoCameFirst, "priority 1 came 10 steps before priority 0 and first"),
        (AgesByTheToken, "a request was asked for its key again, 9 tokens later"),
        (LetsEqualsSwing, "an equal one of step 5 runs: can_preempt(waiting, running). expected False, got True"),
        (ThrowsTheAgedOut, "priority 0 came in step 30, priority 1 of step 0 runs"),
    ],
    "04.victims": [
        (TakesTheMostEntitled, "those who have to go. expected ['d'], got ['a']"),
        (TakesEverybody, "expected ['d'], got ['d', 'c', 'b', 'a']"),
        (
            LooksAtSeatsOnly,
            "urgent (0) needs a seat and 3 blocks: those who have to go. expected ['d', 'c'], got ['d']",
        ),
        (AlwaysOne, "urgent (0) needs a seat and 3 blocks"),
        (SacrificesInVain, "they have 8 in all: those who have to go. expected None"),
        (CountsSharedBlocks, "d shares both its blocks"),
        (CountsBlocksOfOneOwnerOnly, "and c the same two; urgent (0) needs 2 blocks"),
        (AsksNobodysRank, "it outranks d alone, who has 2: those who have to go. expected None"),
        (StopsAtTheFirstItMayNotTake, "urgent (2) needs a seat and outranks c and d: those who have to go. expected ['d']"),
        (PushesThemOutAtOnce, "_victims has changed who runs, or the pool"),
    ],
    "04.saved_list": [
        (CopyingScheduler, "run in 5 blocks of 4; step 2 pushed cy out, and plans tokens for cy"),
        (AsksOnlyAtTheHead, "step 2 pushed cy out, and plans tokens for cy"),
        (StopsAtTheFirstVictim, "who runs. expected one for everybody who runs"),
        (PushesEverybodyOut, "step 2 pushed ana, bo out, and plans tokens for ana, bo"),
    ],
}
