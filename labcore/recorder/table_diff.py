"""Table diff: allocations, shares, copies on write and frees, derived from block tables one step apart.

    table one step ago  7  3  19          now    7  3  19  4         allocate [4]
                        7  3  19                 7  3  20            copy_on_write (19, 20), if the plan has that copy
                        7  3  19                 7                   free [3, 19]

Only tables are compared, so it works with any block pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from labcore.recorder.step_record import RawEvent


@dataclass
class TrackedRequest:
    """Last recorded state of an unfinished request. state: "waiting", "running", "preempted" or "swapped"."""

    number: int
    request: Any
    state: str = "waiting"
    computed: int = 0
    num_hashed: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class TableDiff:
    """Turns changes of block tables into events, appended to the list passed to each method.

    capacity   number of blocks in the pool, as far as known
    owners     block → refcount, for blocks listed by a table
    hashed     blocks in the prefix cache
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.owners: dict[int, int] = {}
        self.hashed: set[int] = set()

    def compare(
        self,
        changed: list[tuple[TrackedRequest, list[int], int]],
        block_copies: Iterable[tuple[int, int]] | None,
        events: list[RawEvent],
    ) -> None:
        """Append the events of all changed tables: frees first, then copies on write, then allocations and shares.

        A block may be freed by one request and allocated to another within the step. block_copies: the plan's (source,
        copy) pairs; None treats every replaced block as a copy.
        """
        copies, additions = [], []
        made = None if block_copies is None else {copy: source for source, copy in block_copies}
        self._grow_pool(max((max(blocks) for _, blocks, _ in changed if blocks), default=0), events)
        for tracked, blocks, found in changed:
            known = tracked.table
            same = _common_prefix_length(known, blocks)
            if same < min(len(known), len(blocks)) and known[same + 1 :] == blocks[same + 1 : len(known)]:
                if made is None or made.get(blocks[same]) == known[same]:
                    copies.append((tracked, known[same], blocks[same]))
                    known[same] = blocks[same]
                    same = len(known)
            self.release(tracked, events, keep=same)
            if same < len(blocks):
                additions.append((tracked, blocks[same:], found))
        for copy in copies:
            self._copy(*copy, events)
        for tracked, blocks, found in additions:
            sources = [(made or {}).get(block, block) for block in blocks]  # a fork that writes at once shares first
            self._append(tracked, sources, found, events)
            start = len(tracked.table) - len(blocks)
            for index, (source, block) in enumerate(zip(sources, blocks, strict=True), start):
                if source != block:
                    self._copy(tracked, source, block, events)
                    tracked.table[index] = block

    def _copy(self, tracked: TrackedRequest, source: int, copy: int, events: list[RawEvent]) -> None:
        self._decref([source])
        self._evict(copy, events, len(events))
        events.append(("copy_on_write", tracked.number, (source, copy), None))
        self.owners[copy] = self.owners.get(copy, 0) + 1

    def _append(self, tracked: TrackedRequest, blocks: list[int], found: int, events: list[RawEvent]) -> None:
        """Append blocks to a table, as one event per run of allocated or shared blocks (shared: KV already computed)."""
        owners, start = self.owners, len(tracked.table)
        run_kind, run = None, []
        for index, block in enumerate(blocks, start):
            count = owners.get(block, 0)
            kind = "share" if count or (index + 1) * self.block_size <= found else "allocate"
            if kind != run_kind:
                run_kind, run = kind, []
                events.append((kind, tracked.number, run, None))
            run.append(block)
            owners[block] = count + 1
            if kind == "allocate":
                self._evict(block, events, len(events) - 1)
        tracked.table += blocks

    def resize(self, capacity: int, events: list[RawEvent]) -> None:
        """The pool reports a new number of blocks."""
        if capacity != self.capacity:
            self.capacity = max(capacity, max(self.owners, default=-1) + 1)
            events.append(("resize", None, (), {"num_blocks": self.capacity}))

    def _grow_pool(self, block: int, events: list[RawEvent]) -> None:
        """Record a block id beyond the pool's capacity, as a faulty pool may allocate it."""
        if block >= self.capacity:
            self.capacity = block + 1
            events.append(("resize", None, (), {"num_blocks": self.capacity}))

    def _evict(self, block: int, events: list[RawEvent], position: int) -> None:
        """Record the eviction of a cached block that is about to be overwritten."""
        if block in self.hashed:
            self.hashed.discard(block)
            events.insert(position, ("evict", None, (block,), None))

    def release(self, tracked: TrackedRequest, events: list[RawEvent], keep: int = 0) -> None:
        """Free all but the first `keep` blocks of the table."""
        blocks = tracked.table[keep:]
        if blocks:
            del tracked.table[keep:]
            events.append(("free", tracked.number, tuple(blocks), None))
            self._decref(blocks)
            tracked.num_hashed = min(tracked.num_hashed, keep)

    def _decref(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]

    def record_hashes(
        self, tracked: TrackedRequest, hash_of: Callable[[int], Any] | None, events: list[RawEvent]
    ) -> None:
        """Record the hashes of blocks that became full since the last call."""
        full = min(tracked.computed // self.block_size, len(tracked.table))
        if hash_of is None or tracked.num_hashed >= full:
            return
        fresh = [block for block in tracked.table[tracked.num_hashed : full] if block not in self.hashed]
        tracked.num_hashed = full
        digests = [(block, hash_of(block)) for block in fresh]
        known = [(block, _hex(digest)) for block, digest in digests if digest is not None]
        if known:
            blocks, hashes = zip(*known, strict=True)
            self.hashed.update(blocks)
            events.append(("cached", tracked.number, blocks, {"hashes": list(hashes)}))

    def record_evictions(
        self, blocks: Iterable[int], hash_of: Callable[[int], Any] | None, events: list[RawEvent]
    ) -> None:
        """Report the blocks that the prefix cache finds no more, though they weren't handed out again."""
        lost = [block for block in blocks if block in self.hashed and (hash_of is None or hash_of(block) is None)]
        if lost:
            self.hashed.difference_update(lost)
            events.append(("evict", None, tuple(lost), None))


def _common_prefix_length(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _hex(digest: Any) -> str:
    if isinstance(digest, bytes):
        return digest.hex()
    return f"{digest & (2**64 - 1):016x}" if isinstance(digest, int) else str(digest)
