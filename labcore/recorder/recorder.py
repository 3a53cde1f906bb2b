"""The flight recorder: what each engine step did to blocks, block tables and queues, as plain data.

The engine calls it at eight points:

    added(request)                      a request was added or forked
    begin_step(step)                    ┐
    scheduled(plan, requests)           │ after planning, before `num_computed_tokens` advances
    sampled(request, token_id)          │ once per token
    finished(request)                   │ finished or aborted; also allowed between steps
    evicted()                           │ the prefix cache evicted blocks by itself; also allowed between steps
    end_step(pool)                      ┘ or roll_back(pool), if the step failed

The pool and the scheduler have no hooks, so any implementation of them can be recorded. Allocations, shares, copies and
frees are derived by comparing each block table with its state one step ago (`labcore.recorder.table_diff`); comparing
lists with a common prefix takes about a nanosecond per element.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from labcore.recorder.recording import Recording
from labcore.recorder.step_record import RawEvent, StepRecord
from labcore.recorder.table_diff import TableDiff, TrackedRequest

UNKNOWN_TOKEN = -1


class Recorder(Recording):
    """Writes a flight record while an engine runs; read it with the methods of `Recording`.

    num_blocks, block_size   of the pool
    num_host_blocks          of the swap space
    max_model_len            tokens that a contiguous cache would reserve per request
    policy                   "fcfs" or "priority": order of the waiting queue
    decode                   token ids → text
    hash_of                  block → its prefix-cache hash, or None; may be set later
    sort_key                 request → its place in the scheduler's queues, a tuple of numbers, smaller first; None: by arrival
    clock                    seconds; only differences are used
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
        sort_key: Callable[[Any], tuple] | None = None,
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
        self.sort_key = sort_key
        self._clock = clock
        self._origin = clock()
        self._tracked: dict[str, TrackedRequest] = {}
        self._num_requests = 0
        self._in_step = False
        self._scheduled: list[TrackedRequest] = []
        self._forked: set[int] = set()  # request numbers, forked since this step was planned
        self._table_diff = TableDiff(block_size, num_blocks)

    def added(self, request: Any) -> None:
        """A request joined the waiting queue. A fork arrives with its tokens and block table."""
        tracked = TrackedRequest(self._num_requests, request)
        self._num_requests += 1
        self._tracked[request.request_id] = tracked
        detail = {
            "name": str(request.request_id),
            "tokens": [*request.prompt_token_ids, *request.output_token_ids],
            "prompt": len(request.prompt_token_ids),
            "priority": request.priority,
            "max_tokens": getattr(request, "max_tokens", None),
        }
        if self.sort_key is not None:
            detail["sort_key"] = list(self.sort_key(request))
        events = self._current_events()
        events.append(("arrive", tracked.number, (), detail))
        if events is self.pending.updated:
            self._forked.add(tracked.number)
        self._record_fork(tracked, events)

    def begin_step(self, step: int | None = None) -> None:
        """Start a step. Step numbers ascend; `step` None, or one already used, means the next free number."""
        if self._in_step:  # the previous step failed
            self.roll_back()
        following = self._next_step()
        self.pending = self.pending or StepRecord(following)
        self.pending.step = following if step is None else max(step, following)
        self.pending.start = self._clock() - self._origin
        self._in_step = True

    def scheduled(self, plan: Any, requests: Iterable[Any]) -> None:
        """Record the scheduler's decision: `plan` is a `SchedulerOutput`, `requests` its requests in batch order."""
        record = self.pending
        if plan.swaps_out:
            self._record_swap_out(plan.swaps_out)
        for request_id in plan.preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.state == "running":
                self._record_preemption(tracked, record.planned)
        changed, chunks, batch = [], [], []
        counts = plan.num_scheduled_tokens
        for request in requests:
            request_id = request.request_id
            tracked = self._tracked.get(request_id)
            if tracked is None:
                self.added(request)
                tracked = self._tracked[request_id]
            found = 0
            if tracked.state != "running":
                found = self._record_admission(tracked, plan.swaps_in, record.planned)
            elif tracked.computed != request.num_computed_tokens:
                self._record_computed(tracked, request.num_computed_tokens)
            count = counts[request_id]
            chunks.append(tracked.number)
            chunks.append(count)
            tracked.computed += count
            batch.append(tracked)
            blocks = request.table.blocks
            if blocks != tracked.table:
                changed.append((tracked, list(blocks), found))
        if changed:
            self._table_diff.compare(changed, plan.block_copies, record.planned)
        record.chunks, self._scheduled = chunks, batch

    def sampled(self, request: Any, token_id: int) -> None:
        """A request gained a token. A request forked in this step arrived with it, so it is not counted again."""
        if request.request_id not in self._tracked:
            self.added(request)
        number = self._tracked[request.request_id].number
        if number not in self._forked:
            self.pending.tokens.append(number)
            self.pending.tokens.append(token_id)

    def finished(self, request: Any) -> None:
        """A request ended for `request.finish_reason`. Its blocks are recorded as free, even if the pool frees them later."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        events = self._current_events()
        self._table_diff.record_hashes(tracked, self.hash_of, events)
        if request.finish_reason == "error":
            self._table_diff.record_evictions(tracked.table, self.hash_of, events)
        self._table_diff.release(tracked, events)
        events.append(("finish", tracked.number, (), {"reason": request.finish_reason}))

    def evicted(self) -> None:
        """The prefix cache may find fewer blocks than before, though none was handed out again."""
        self._table_diff.record_evictions(sorted(self._table_diff.hashed), self.hash_of, self._current_events())

    def roll_back(self, pool: Any = None) -> None:
        """The step broke off, in any phase, and is over: a request that ran and waits now has lost its blocks."""
        events = self._current_events()
        for tracked in self._scheduled:
            self._table_diff.record_hashes(tracked, self.hash_of, events)
        for tracked in self._tracked.values():
            if tracked.state == "running" and _status(tracked.request) == "WAITING":
                self._record_preemption(tracked, events)
        self.evicted()
        self.end_step(pool)

    def end_step(self, pool: Any = None) -> None:
        """The step is over. The pool, if given, says how many blocks it has and how many are free."""
        if not self._in_step:
            self.begin_step()
        record = self.pending
        for tracked in self._tracked.values():
            if tracked.state == "waiting":
                self._record_fork(tracked, record.updated)
        if self.hash_of is not None:
            for tracked in self._scheduled:
                if tracked.state == "running":
                    self._table_diff.record_hashes(tracked, self.hash_of, record.updated)
        self._table_diff.resize(getattr(pool, "num_blocks", self._table_diff.capacity), record.updated)
        self._scheduled = []
        self._forked.clear()
        record.pool_free = getattr(pool, "num_free", None)
        record.duration = self._clock() - self._origin - record.start
        record.chunks, record.tokens = array("i", record.chunks), array("i", record.tokens)
        self.records.append(record)
        self.pending = None
        self._in_step = False

    def observe(self, tables: Mapping[str, Any], pool: Any = None) -> None:
        """Record one step from block tables alone (name → `BlockTable`), without an engine.

        A new name is a new request; a missing one has finished. Tokens are counted, their ids unknown.
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

    def _current_events(self) -> list[RawEvent]:
        """The list for events of this moment: `planned` before chunks are scheduled, `updated` after."""
        if self.pending is None:
            self.pending = StepRecord(self._next_step(), self._clock() - self._origin)
        return self.pending.updated if self.pending.chunks else self.pending.planned

    def _next_step(self) -> int:
        return self.records[-1].step + 1 if self.records else 1

    def _record_fork(self, tracked: TrackedRequest, events: list[RawEvent]) -> None:
        """A waiting request that holds blocks is a fork: it is running, although no plan has listed it yet."""
        table = getattr(tracked.request, "table", None)
        if table is not None and table.blocks:
            self._record_admission(tracked, (), events)
            self._table_diff.compare([(tracked, list(table.blocks), tracked.computed)], (), events)

    def _record_admission(
        self, tracked: TrackedRequest, swaps_in: Sequence[tuple[int, int]], events: list[RawEvent]
    ) -> int:
        """Return the number of tokens whose KV came from a prefix hit or a fork."""
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

    def _record_computed(self, tracked: TrackedRequest, computed: int) -> None:
        self.pending.planned.append(("computed", tracked.number, (), {"computed": computed}))
        tracked.computed = computed
        tracked.num_hashed = min(tracked.num_hashed, computed // self.block_size)

    def _record_preemption(self, tracked: TrackedRequest, events: list[RawEvent]) -> None:
        self._table_diff.release(tracked, events)
        events.append(("preempt", tracked.number, (), None))
        tracked.state, tracked.computed, tracked.num_hashed = "preempted", 0, 0

    def _record_swap_out(self, swaps: Sequence[tuple[int, int]]) -> None:
        """Swaps list blocks, not requests: a swapped request is found by its status."""
        host = dict(swaps)
        for tracked in self._tracked.values():
            if tracked.state == "running" and _status(tracked.request) == "SWAPPED":
                blocks = tuple(tracked.table)
                events = self.pending.planned
                self._table_diff.release(tracked, events)
                tracked.host = [host[block] for block in blocks if block in host]
                events.append(("swap_out", tracked.number, blocks, {"host": tracked.host}))
                tracked.state, tracked.num_hashed = "swapped", 0

def _status(request: Any) -> str | None:
    return getattr(getattr(request, "status", None), "name", None)
