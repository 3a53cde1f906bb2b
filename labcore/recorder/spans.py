"""Spans: what a request was doing from one step to the next, as plain data. Every timeline is drawn from them.

    ana   waiting ──┤ prefill ┤ decode ─────────┤
    bo    waiting ──────────┤ prefill ┤ decode ──┤ idle ───┤        idle: done, but its slot is held (static batching)
"""

from __future__ import annotations

from dataclasses import dataclass

SPAN_STATES = ("waiting", "prefill", "decode", "preempted", "swapped", "idle")


@dataclass(frozen=True)
class Span:
    """One request in one state from `start` up to, not including, `stop`; steps, or seconds if all spans use them.

    state is one of SPAN_STATES. Raises ValueError for another one, or if the span ends before it starts.
    """

    request_id: str
    start: float
    stop: float
    state: str

    def __post_init__(self) -> None:
        if self.state not in SPAN_STATES:
            raise ValueError(f"state is {self.state!r}; it must be one of {', '.join(map(repr, SPAN_STATES))}.")
        if self.stop < self.start:
            raise ValueError(f"stop is {self.stop}; it must be at least start, {self.start}.")
