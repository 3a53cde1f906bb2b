"""Snapshots: the state of pool, block tables and queues after one step, rebuilt by replaying a flight record.

A record holds only changes. `Replay` applies them to mutable state; `Replay.snapshot()` copies that state out as plain
data. The effect of each kind of event is defined here only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from labcore.recorder.step_record import StepRecord, pairs

ABSENT: dict[str, Any] = {}


class BlockState(NamedTuple):
    """One physical block after a step.

    owners    (request id, logical index) of each table that lists it, oldest request first
    tokens    ids whose KV it holds, in order; a cached block keeps them when its refcount reaches 0
    hash      prefix-cache hash, hexadecimal, or None
    since     step of its last change of owners
    state     "free", "cached" (free, but available to a prefix hit), "owned" or "shared"
    """

    block: int
    owners: tuple[tuple[str, int], ...]
    tokens: tuple[int, ...]
    hash: str | None
    since: int

    @property
    def refcount(self) -> int:
        return len(self.owners)

    @property
    def state(self) -> str:
        if self.owners:
            return "owned" if len(self.owners) == 1 else "shared"
        return "free" if self.hash is None else "cached"


class RequestState(NamedTuple):
    """One unfinished request after a step. `number` counts requests in their order of arrival, from 0.

    sort_key   its place in the scheduler's queues, smaller first; fixed from its arrival on
    """

    request_id: str
    number: int
    state: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    priority: int
    max_tokens: int | None
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    sort_key: tuple[float, ...]


@dataclass(frozen=True)
class Snapshot:
    """The recorded state after one step.

    time        end of the step, seconds since the recorder was created
    blocks      [num_blocks], by block id
    requests    unfinished requests by id, in order of arrival
    scheduled   tokens computed for each request in this step, in batch order
    pool_free   free blocks as counted by the pool; None if not reported
    """

    step: int
    time: float
    block_size: int
    blocks: tuple[BlockState, ...]
    requests: dict[str, RequestState]
    scheduled: dict[str, int]
    pool_free: int | None

    @property
    def tables(self) -> dict[str, list[int]]:
        """Block table of each request that holds blocks: request id → physical blocks, in logical order."""
        return {name: list(r.blocks) for name, r in self.requests.items() if r.blocks}

    @property
    def queues(self) -> dict[str, list[str]]:
        """Request ids "waiting", "running" and "swapped", each in the scheduler's order."""
        queues: dict[str, list[str]] = {"waiting": [], "running": [], "swapped": []}
        for request in sorted(self.requests.values(), key=lambda request: request.sort_key):
            queues["waiting" if request.state == "preempted" else request.state].append(request.request_id)
        return queues

    def count(self, state: str) -> int:
        """Number of blocks in a state: "free", "cached", "owned" or "shared"."""
        return sum(block.state == state for block in self.blocks)

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as plain dicts and lists, for JSON."""
        return {
            "step": self.step,
            "time": self.time,
            "block_size": self.block_size,
            "blocks": [block._asdict() | {"state": block.state} for block in self.blocks],
            "requests": [request._asdict() for request in self.requests.values()],
            "scheduled": self.scheduled,
            "queues": self.queues,
            "pool_free": self.pool_free,
        }

    @property
    def leaked(self) -> int:
        """Allocated blocks that no table lists; negative if listed blocks are free. 0 if the pool does not report."""
        idle = self.count("free") + self.count("cached")
        return 0 if self.pool_free is None else idle - self.pool_free


@dataclass
class LiveRequest:
    """Mutable state of one unfinished request."""

    name: str
    number: int
    tokens: list[int]
    num_prompt_tokens: int
    priority: int
    max_tokens: int | None
    sort_key: tuple[float, ...]
    state: str = "waiting"
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class Replay:
    """Applies step records in order. `owners[block]` lists the numbers of the requests whose tables contain it."""

    def __init__(self, num_blocks: int, block_size: int, policy: str = "fcfs") -> None:
        self.block_size = block_size
        self.policy = policy
        self.step = 0
        self.time = 0.0
        self.live: dict[int, LiveRequest] = {}
        self.names: dict[int, str] = {}
        self.owners: list[list[int]] = []
        self.contents: list[tuple[int, ...]] = []
        self.hashes: list[str | None] = []
        self.since: list[int] = []
        self.chunks: list[int] = []
        self.pool_free: int | None = None
        self._resize(num_blocks)

    def apply(self, record: StepRecord) -> None:
        """Advance by one `StepRecord`."""
        self.step = record.step
        for event in record.planned:
            self._apply(*event)
        self.chunks = record.chunks
        for number, count in pairs(record.chunks):
            self.live[number].computed += count
        for number, token in pairs(record.tokens):
            self.live[number].tokens.append(token)
        for event in record.updated:
            self._apply(*event)
        self.pool_free = record.pool_free
        self.time = record.start + record.duration

    def snapshot(self) -> Snapshot:
        """An immutable copy of the current state."""
        size = self.block_size
        places: list[list[tuple[str, int]]] = [[] for _ in self.owners]
        contents = list(self.contents)
        for request in self.live.values():
            written = request.tokens[: request.computed]
            for index, block in enumerate(request.table):
                held = tuple(written[index * size : (index + 1) * size])
                if not places[block] or len(held) > len(contents[block]):
                    contents[block] = held
                places[block].append((request.name, index))
        blocks = tuple(
            BlockState(i, tuple(places[i]), contents[i], self.hashes[i], self.since[i]) for i in range(len(places))
        )
        requests = {
            r.name: RequestState(
                r.name, r.number, r.state, tuple(r.tokens), r.num_prompt_tokens, r.computed, r.cached, r.preemptions,
                r.priority, r.max_tokens, tuple(r.table), tuple(r.host), r.sort_key,
            )
            for r in self.live.values()
        }  # fmt: skip
        scheduled = {self.names[number]: count for number, count in pairs(self.chunks)}
        return Snapshot(self.step, self.time, size, blocks, requests, scheduled, self.pool_free)

    def _apply(self, kind: str, number: int | None, blocks: Sequence[int], detail: dict[str, Any] | None) -> None:
        detail = detail or ABSENT
        if kind == "arrive":
            self.names[number] = detail["name"]
            self.live[number] = LiveRequest(
                detail["name"],
                number,
                list(detail["tokens"]),
                detail["prompt"],
                detail["priority"],
                detail["max_tokens"],
                tuple(detail.get("sort_key") or self._default_key(detail["priority"], number)),
            )
        elif kind == "resize":
            self._resize(detail["num_blocks"])
        elif kind == "cached":
            for block, digest in zip(blocks, detail["hashes"], strict=True):
                self.hashes[block] = digest
        elif kind == "evict":
            for block in blocks:
                self.hashes[block] = None
        else:
            self._apply_to(self.live[number], kind, blocks, detail)

    def _apply_to(self, request: LiveRequest, kind: str, blocks: Sequence[int], detail: dict[str, Any]) -> None:
        if kind in ("admit", "resume"):
            request.state, request.computed, request.cached = "running", detail["computed"], detail["cached"]
        elif kind == "computed":
            request.computed = detail["computed"]
        elif kind in ("allocate", "share"):
            request.table.extend(blocks)
            self._own(request.number, blocks)
        elif kind == "copy_on_write":
            source, copy = blocks
            index = len(request.table) - 1 - request.table[::-1].index(source)
            self._release(request, index, [source])
            request.table[index] = copy
            self._own(request.number, [copy])
        elif kind == "free":
            kept = len(request.table) - len(blocks)
            self._release(request, kept, blocks)
            del request.table[kept:]
        elif kind == "preempt":
            request.state, request.computed = "preempted", 0
            request.preemptions += 1
        elif kind == "swap_out":
            request.state, request.host = "swapped", list(detail["host"])
            request.preemptions += 1
        elif kind == "swap_in":
            request.host = []
        elif kind == "finish":
            del self.live[request.number]

    def _default_key(self, priority: int, number: int) -> tuple[int, ...]:
        """The place in the queues where the record doesn't say it: by arrival, under "priority" by number first."""
        return (priority, number) if self.policy == "priority" else (number,)

    def _own(self, number: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.owners[block].append(number)
            self.since[block] = self.step

    def _release(self, request: LiveRequest, index: int, blocks: Sequence[int]) -> None:
        """Remove the request from the owners of `blocks`, which start at logical `index`; cached blocks keep their tokens."""
        size = self.block_size
        for logical, block in enumerate(blocks, index):
            owners = self.owners[block]
            if len(owners) == 1:
                written = request.tokens[logical * size : min((logical + 1) * size, request.computed)]
                self.contents[block] = () if self.hashes[block] is None else tuple(written)
            owners.remove(request.number)
            self.since[block] = self.step

    def _resize(self, num_blocks: int) -> None:
        more = num_blocks - len(self.owners)
        if more < 0:
            del self.owners[more:], self.contents[more:], self.hashes[more:], self.since[more:]
        else:
            self.owners += [[] for _ in range(more)]
            self.contents += [()] * more
            self.hashes += [None] * more
            self.since += [self.step] * more
