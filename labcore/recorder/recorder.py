"""The flight recorder: what every step did to blocks, tables and queues, as plain data. It is behind every picture.

The engine makes eight calls at fixed points of its life, and nothing else in it knows of the recorder:

    added(request)                      a request joined, or was forked from another
    begin_step(step)                    ┐
    scheduled(plan, requests)           │ after planning, before `num_computed_tokens` moves
    sampled(request, token_id)          │ one call a token
    finished(request)                   │ ended or aborted; also legal between two steps
    evicted()                           │ the prefix cache dropped blocks by itself; also legal between two steps
    end_step(pool)                      ┘ or roll_back(pool), if the step broke off

The pool and the scheduler have no hooks, so that any learner's version can be recorded: who took, shared, copied or
gave back a block is found by comparing each table with what it was a step ago (`labcore.recorder.table_diff`). That costs
little, since tables grow at the end and two lists that begin with the same objects compare at a nanosecond an element.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from labcore.recorder.recording import RareEvent, Recording, StepRecord
from labcore.recorder.table_diff import BlockLedger, Tracked

UNKNOWN_TOKEN = -1


class Recorder(Recording):
    """Writes a flight record while an engine runs; read it with the methods of `Recording`.

    num_blocks, block_size   of the pool
    num_host_blocks          of the swap space
    max_model_len            what a contiguous cache would reserve for each request
    policy                   "fcfs" or "priority": the order in which the waiting stand
    decode                   token ids → text, for the pictures
    hash_of                  block → what the prefix cache knows it by, or None; may be set later
    clock                    seconds; only differences count
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        decode: Callable[[list[int]], str] | None = None,
        hash_of: Callable[[int], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
            policy=policy,
            decode=decode,
        )
        self.hash_of = hash_of
        self._clock = clock
        self._origin = clock()
        self._tracked: dict[str, Tracked] = {}
        self._num_requests = 0
        self._in_step = False
        self._worked: list[Tracked] = []
        self._forked: set[int] = set()  # numbers of those that were forked since the work of this step was planned
        self._ledger = BlockLedger(block_size, num_blocks)

    def added(self, request: Any) -> None:
        """A request joined the queue. A fork brings tokens, and a table, that it already has."""
        tracked = Tracked(self._num_requests, request)
        self._num_requests += 1
        self._tracked[request.request_id] = tracked
        detail = {
            "name": str(request.request_id),
            "tokens": [*request.prompt_token_ids, *request.output_token_ids],
            "prompt": len(request.prompt_token_ids),
            "priority": request.priority,
            "max_tokens": getattr(request, "max_tokens", None),
        }
        events = self._now()
        events.append(("arrive", tracked.number, (), detail))
        if events is self.pending.after:
            self._forked.add(tracked.number)
        self._join(tracked, events)

    def begin_step(self, step: int | None = None) -> None:
        """A step starts. Step numbers grow; the next free one is taken when `step` is None or has been used."""
        if self._in_step:  # the step before broke off with an error
            self.roll_back()
        following = self._following_step()
        self.pending = self.pending or StepRecord(following)
        self.pending.step = following if step is None else max(step, following)
        self.pending.start = self._clock() - self._origin
        self._in_step = True

    def scheduled(self, plan: Any, requests: Iterable[Any]) -> None:
        """The scheduler has decided: `plan` is its `SchedulerOutput`, `requests` are those in it, in batch order."""
        record = self.pending
        if plan.swaps_out:
            self._swap_out(plan.swaps_out)
        for request_id in plan.preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.state == "running":
                self._preempt(tracked, record.before)
        changed, work, worked = [], [], []
        counts = plan.num_scheduled_tokens
        for request in requests:
            request_id = request.request_id
            tracked = self._tracked.get(request_id)
            if tracked is None:
                self.added(request)
                tracked = self._tracked[request_id]
            found = 0
            if tracked.state != "running":
                found = self._admit(tracked, plan.swaps_in, record.before)
            elif tracked.computed != request.num_computed_tokens:
                self._correct(tracked, request.num_computed_tokens)
            count = counts[request_id]
            work.append(tracked.number)
            work.append(count)
            tracked.computed += count
            worked.append(tracked)
            blocks = request.table.blocks
            if blocks != tracked.table:
                changed.append((tracked, list(blocks), found))
        if changed:
            self._ledger.compare(changed, plan.block_copies, record.before)
        record.work, self._worked = work, worked

    def sampled(self, request: Any, token_id: int) -> None:
        """A request gained a token. One that was forked in this very step arrived with it already."""
        if request.request_id not in self._tracked:
            self.added(request)
        number = self._tracked[request.request_id].number
        if number not in self._forked:
            self.pending.tokens.append(number)
            self.pending.tokens.append(token_id)

    def finished(self, request: Any) -> None:
        """A request ended, for the reason in `request.finish_reason`; its blocks are free, or free in a moment."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        events = self._now()
        self._ledger.note_hashes(tracked, self.hash_of, events)
        if request.finish_reason == "error":
            self._ledger.note_forgotten(tracked.table, self.hash_of, events)
        self._ledger.release(tracked, events)
        events.append(("finish", tracked.number, (), {"reason": request.finish_reason}))

    def evicted(self) -> None:
        """The prefix cache may find fewer blocks than before, though none was handed out again."""
        self._ledger.note_forgotten(sorted(self._ledger.hashed), self.hash_of, self._now())

    def roll_back(self, pool: Any = None) -> None:
        """The step broke off, in any phase, and is over: a request that ran and waits now has lost its blocks."""
        events = self._now()
        for tracked in self._worked:
            self._ledger.note_hashes(tracked, self.hash_of, events)
        for tracked in self._tracked.values():
            if tracked.state == "running" and _status(tracked.request) == "WAITING":
                self._preempt(tracked, events)
        self.evicted()
        self.end_step(pool)

    def end_step(self, pool: Any = None) -> None:
        """The step is over. The pool, if given, says how many blocks it has and how many are free."""
        if not self._in_step:
            self.begin_step()
        record = self.pending
        for tracked in self._tracked.values():
            if tracked.state == "waiting":
                self._join(tracked, record.after)
        if self.hash_of is not None:
            for tracked in self._worked:
                if tracked.state == "running":
                    self._ledger.note_hashes(tracked, self.hash_of, record.after)
        self._ledger.resize(getattr(pool, "num_blocks", self._ledger.capacity), record.after)
        self._worked = []
        self._forked.clear()
        record.pool_free = getattr(pool, "num_free", None)
        record.duration = self._clock() - self._origin - record.start
        record.work, record.tokens = array("i", record.work), array("i", record.tokens)
        self.records.append(record)
        self.pending = None
        self._in_step = False

    def observe(self, tables: Mapping[str, Any], pool: Any = None) -> None:
        """Record one step from block tables alone (name → `BlockTable`), with no engine: for pools driven by hand.

        A name that is new joins, one that is missing has ended. Tokens count, their ids are not known.
        """
        self.begin_step()
        for name in [name for name in self._tracked if name not in tables]:
            self.finished(SimpleNamespace(request_id=name, finish_reason="stop"))
        requests = []
        for name, table in tables.items():
            known = self._tracked[name].computed if name in self._tracked else 0
            growth = max(0, table.num_tokens - known)
            request = SimpleNamespace(
                request_id=name,
                prompt_token_ids=[UNKNOWN_TOKEN] * table.num_tokens,
                output_token_ids=[],
                priority=0,
                table=table,
                num_computed_tokens=table.num_tokens - growth,
                num_cached_tokens=0,
            )
            if name in self._tracked:
                for _ in range(growth):
                    self.sampled(request, UNKNOWN_TOKEN)
            else:
                self.added(request)
            requests.append((request, growth))
        counts = {request.request_id: growth for request, growth in requests}
        plan = SimpleNamespace(num_scheduled_tokens=counts, swaps_out=(), swaps_in=(), block_copies=None, preempted=())
        self.scheduled(plan, [request for request, _ in requests])
        self.end_step(pool)

    def _now(self) -> list[RareEvent]:
        """Where events of this moment go: a record's `before` until work is planned, its `after` from then on."""
        if self.pending is None:
            self.pending = StepRecord(self._following_step(), self._clock() - self._origin)
        return self.pending.after if self.pending.work else self.pending.before

    def _following_step(self) -> int:
        return self.records[-1].step + 1 if self.records else 1

    def _join(self, tracked: Tracked, events: list[RareEvent]) -> None:
        """A waiting request that holds blocks was forked from another: it runs, though no plan has named it yet."""
        table = getattr(tracked.request, "table", None)
        if table is not None and table.blocks:
            self._admit(tracked, (), events)
            self._ledger.compare([(tracked, list(table.blocks), tracked.computed)], (), events)

    def _admit(self, tracked: Tracked, swaps_in: Sequence[tuple[int, int]], events: list[RareEvent]) -> int:
        """Returns the number of tokens whose KV a prefix hit brought along, or a fork."""
        request = tracked.request
        found = request.num_computed_tokens
        kind, cached = "resume", found
        if tracked.state == "waiting":
            kind, cached = "admit", request.num_cached_tokens
        elif tracked.state == "swapped":
            pairs = [list(pair) for pair in swaps_in if pair[0] in tracked.host]
            events.append(("swap_in", tracked.number, tuple(block for _, block in pairs), {"pairs": pairs}))
            cached, tracked.host = 0, []
        events.append((kind, tracked.number, (), {"computed": found, "cached": cached}))
        if cached:
            hit = request.table.blocks[: -(-cached // self.block_size)]
            events.append(("cache_hit", tracked.number, tuple(hit), {"tokens": cached}))
        was_swapped = tracked.state == "swapped"
        tracked.state, tracked.computed = "running", found
        return 0 if was_swapped else found

    def _correct(self, tracked: Tracked, computed: int) -> None:
        self.pending.before.append(("computed", tracked.number, (), {"computed": computed}))
        tracked.computed = computed
        tracked.num_hashed = min(tracked.num_hashed, computed // self.block_size)

    def _preempt(self, tracked: Tracked, events: list[RareEvent]) -> None:
        self._ledger.release(tracked, events)
        events.append(("preempt", tracked.number, (), None))
        tracked.state, tracked.computed, tracked.num_hashed = "preempted", 0, 0

    def _swap_out(self, swaps: Sequence[tuple[int, int]]) -> None:
        """Swaps name blocks, not requests: a swapped request is one whose status says so since the last step."""
        host = dict(swaps)
        for tracked in self._tracked.values():
            if tracked.state == "running" and _status(tracked.request) == "SWAPPED":
                blocks = tuple(tracked.table)
                events = self.pending.before
                self._ledger.release(tracked, events)
                tracked.host = [host[block] for block in blocks if block in host]
                events.append(("swap_out", tracked.number, blocks, {"host": tracked.host}))
                tracked.state, tracked.num_hashed = "swapped", 0

def _status(request: Any) -> str | None:
    return getattr(getattr(request, "status", None), "name", None)
