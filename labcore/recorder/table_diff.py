"""The recorder's block ledger: who owned what a step ago, and so what a changed table means.

    table a step ago    7  3  19          now    7  3  19  4         allocate [4]
                        7  3  19                 7  3  20            copy_on_write (19, 20), if the plan says so
                        7  3  19                 7                   free [3, 19]

Only tables are looked at, so that any pool can stand behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from labcore.recorder.recording import RareEvent


@dataclass
class Tracked:
    """What the recorder last knew of an unfinished request. state: "waiting", "running", "preempted" or "swapped"."""

    number: int
    request: Any
    state: str = "waiting"
    computed: int = 0
    num_hashed: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class BlockLedger:
    """Turns what changed in tables into events, which it appends to the list it is given.

    capacity   blocks of the pool, as far as known
    owners     refcount of every block that a table lists
    hashed     blocks that the prefix cache can find
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.owners: dict[int, int] = {}
        self.hashed: set[int] = set()

    def compare(
        self,
        changed: list[tuple[Tracked, list[int], int]],
        block_copies: Iterable[tuple[int, int]] | None,
        events: list[RareEvent],
    ) -> None:
        """Say how tables changed: first what was given back, then what was copied, then what was taken.

        In that order, since a block may pass from one request to another within the step. block_copies: the (source,
        copy) pairs of the plan; None takes every single block that was replaced for a copy.
        """
        copies, additions = [], []
        made = None if block_copies is None else {copy: source for source, copy in block_copies}
        self._make_room(max((max(blocks) for _, blocks, _ in changed if blocks), default=0), events)
        for tracked, blocks, found in changed:
            known = tracked.table
            same = _common(known, blocks)
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
            sources = [(made or {}).get(block, block) for block in blocks]  # a fork that wrote at once shared first
            self._take(tracked, sources, found, events)
            start = len(tracked.table) - len(blocks)
            for index, (source, block) in enumerate(zip(sources, blocks, strict=True), start):
                if source != block:
                    self._copy(tracked, source, block, events)
                    tracked.table[index] = block

    def _copy(self, tracked: Tracked, source: int, copy: int, events: list[RareEvent]) -> None:
        self._disown([source])
        self._evict(copy, events, len(events))
        events.append(("copy_on_write", tracked.number, (source, copy), None))
        self.owners[copy] = self.owners.get(copy, 0) + 1

    def _take(self, tracked: Tracked, blocks: list[int], found: int, events: list[RareEvent]) -> None:
        """Append blocks to a table, in runs of equal kind: fresh ones, and ones whose KV is already there."""
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

    def resize(self, capacity: int, events: list[RareEvent]) -> None:
        """The pool says that it has another number of blocks now."""
        if capacity != self.capacity:
            self.capacity = max(capacity, max(self.owners, default=-1) + 1)
            events.append(("resize", None, (), {"num_blocks": self.capacity}))

    def _make_room(self, block: int, events: list[RareEvent]) -> None:
        """A learner's pool may hand out an id that it shouldn't have; the record shows it."""
        if block >= self.capacity:
            self.capacity = block + 1
            events.append(("resize", None, (), {"num_blocks": self.capacity}))

    def _evict(self, block: int, events: list[RareEvent], place: int) -> None:
        """What the prefix cache knew a block by is gone once something else is written into it."""
        if block in self.hashed:
            self.hashed.discard(block)
            events.insert(place, ("evict", None, (block,), None))

    def release(self, tracked: Tracked, events: list[RareEvent], keep: int = 0) -> None:
        """The request gives back all but the first `keep` blocks of its table."""
        blocks = tracked.table[keep:]
        if blocks:
            del tracked.table[keep:]
            events.append(("free", tracked.number, tuple(blocks), None))
            self._disown(blocks)
            tracked.num_hashed = min(tracked.num_hashed, keep)

    def _disown(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]

    def note_hashes(
        self, tracked: Tracked, hash_of: Callable[[int], Any] | None, events: list[RareEvent]
    ) -> None:
        """Ask the prefix cache about blocks that have become full since it was last asked."""
        full = min(tracked.computed // self.block_size, len(tracked.table))
        if hash_of is None or tracked.num_hashed >= full:
            return
        fresh = [block for block in tracked.table[tracked.num_hashed : full] if block not in self.hashed]
        tracked.num_hashed = full
        digests = [(block, hash_of(block)) for block in fresh]
        known = [(block, _hexadecimal(digest)) for block, digest in digests if digest is not None]
        if known:
            blocks, hashes = zip(*known, strict=True)
            self.hashed.update(blocks)
            events.append(("cached", tracked.number, blocks, {"hashes": list(hashes)}))

    def note_forgotten(
        self, blocks: Iterable[int], hash_of: Callable[[int], Any] | None, events: list[RareEvent]
    ) -> None:
        """Report the blocks that the prefix cache finds no more, though they weren't handed out again."""
        lost = [block for block in blocks if block in self.hashed and (hash_of is None or hash_of(block) is None)]
        if lost:
            self.hashed.difference_update(lost)
            events.append(("evict", None, tuple(lost), None))


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _hexadecimal(digest: Any) -> str:
    if isinstance(digest, bytes):
        return digest.hex()
    return f"{digest & (2**64 - 1):016x}" if isinstance(digest, int) else str(digest)
