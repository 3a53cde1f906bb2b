"""Step records: what one engine step changed, as plain data. The format in memory, and line by line on disk.

Frequent facts (a chunk computed, a token sampled) are packed into flat lists of integers; rare ones (a block changes
owner, a request arrives or finishes) are one tuple each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

EVENT_KINDS = (
    "arrive", "admit", "cache_hit", "allocate", "share", "copy_on_write", "free", "cached", "evict",
    "preempt", "swap_out", "swap_in", "resume", "computed", "chunk", "token", "finish", "resize",
)  # fmt: skip

RawEvent = tuple[str, int | None, Sequence[int], dict[str, Any] | None]
"""kind, request number, blocks, detail."""


@dataclass(slots=True)
class StepRecord:
    """The changes of one step, in order: planned, chunks, tokens, updated.

    start, duration   seconds; start counts from the creation of the recorder
    planned           events of planning: admissions, preemptions, allocations, copies
    chunks            request number, tokens computed, … in batch order; a list during the step, then an int32 array
    tokens            request number, sampled token id, … likewise
    updated           events after the forward pass: finished requests, freed and cached blocks
    pool_free         free blocks as counted by the pool; None if not reported
    """

    step: int
    start: float = 0.0
    duration: float = 0.0
    planned: list[RawEvent] = field(default_factory=list)
    chunks: Sequence[int] = field(default_factory=list)
    tokens: Sequence[int] = field(default_factory=list)
    updated: list[RawEvent] = field(default_factory=list)
    pool_free: int | None = None


def pairs(flat: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Unpack `chunks` or `tokens`: [a, 1, b, 2] → (a, 1), (b, 2)."""
    return zip(flat[::2], flat[1::2], strict=True)
