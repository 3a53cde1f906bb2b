"""A flight record: one `StepRecord` a step, and the questions one can ask of it.

What happens to every request in every step (a chunk of work, a token) is packed into flat lists of numbers; what is
rare (a block changes hands, a request joins or leaves) is one tuple each. `events()` unpacks both into plain events,
`at()` replays them into a snapshot, `spans()` turns them into a timeline. No torch, no pictures here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labcore.recorder.snapshot import Replay, Snapshot, pairs

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


EVENT_KINDS = (
    "arrive", "admit", "cache_hit", "allocate", "share", "copy_on_write", "free", "cached", "evict",
    "preempt", "swap_out", "swap_in", "resume", "computed", "chunk", "token", "finish", "resize",
)  # fmt: skip

RareEvent = tuple[str, int | None, Sequence[int], dict[str, Any] | None]


@dataclass(slots=True)
class StepRecord:
    """What one step changed, in the order in which it happened: before, work, tokens, after.

    start, duration   seconds; start counts from the moment the recorder was made
    before, after     rare events (kind, request number, blocks, detail), from planning and from the update
    work              request number, tokens computed, … in batch order; a list while it grows, then an array of 32 bits
    tokens            request number, sampled token id, … likewise
    pool_free         free blocks by the pool's own count, None if it doesn't say
    """

    step: int
    start: float = 0.0
    duration: float = 0.0
    before: list[RareEvent] = field(default_factory=list)
    work: Sequence[int] = field(default_factory=list)
    tokens: Sequence[int] = field(default_factory=list)
    after: list[RareEvent] = field(default_factory=list)
    pool_free: int | None = None


@dataclass(frozen=True)
class Event:
    """One thing that happened: kind is one of EVENT_KINDS, time in seconds (the start of its step).

    request   request id, or None for an event of the pool alone
    blocks    physical blocks; copy_on_write names (source, copy)
    detail    numbers that only this kind has: tokens, token, reason, …
    """

    step: int
    time: float
    kind: str
    request: str | None
    blocks: tuple[int, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


class Recording:
    """A flight record that can be read. `Recorder` writes one; `Recording.load` gets one back from a file.

    decode   token ids → text, for the pictures; None shows ids. A loaded record decodes with the pieces in its file.
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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.max_model_len = max_model_len
        self.policy = policy
        self.decode = decode
        self.records: list[StepRecord] = []
        self.pending: StepRecord | None = None  # events since the last step that is over; part of the next one
        self._cursor = (0, self._replay())  # records applied so far, and the picture they gave
        self._seen: Snapshot | None = None

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps, ascending; `at` takes each of them."""
        return [record.step for record in self.records]

    def at(self, step: int | None = None) -> Snapshot:
        """The state after `step`; if None, after everything known so far. Walking forwards costs only the new steps.

        Raises ValueError for a step that was not recorded.
        """
        if step is None:
            return self._latest()
        if self._seen is not None and self._seen.step == step:
            return self._seen
        stop = bisect_right(self.records, step, key=lambda record: record.step)
        if stop == 0 or self.records[stop - 1].step != step:
            known = f"{self.records[0].step} … {self.records[-1].step}" if self.records else "none yet"
            raise ValueError(f"step is {step}; recorded steps are {known}.")
        done, replay = self._cursor
        if done > stop:
            done, replay = 0, self._replay()
        for record in self.records[done:stop]:
            replay.apply(record)
        self._cursor = (stop, replay)
        self._seen = replay.snapshot()
        return self._seen

    def request_ids(self) -> list[str]:
        """Every request of the run in order of arrival; the place is the request's number. An id may come twice."""
        return [
            detail["name"]
            for record in self._all_records()
            for kind, _, _, detail in (*record.before, *record.after)
            if kind == "arrive"
        ]

    def snapshots(self, steps: Iterable[int] | None = None) -> Iterator[Snapshot]:
        """A snapshot after each of `steps` (ascending; all when None), in one pass."""
        for step in self.steps if steps is None else steps:
            yield self.at(step)

    def events(self, step: int | None = None) -> Iterator[Event]:
        """Every event in order, or those of one step."""
        names: dict[int, str] = {}
        for record in self._all_records():
            wanted = step is None or record.step == step
            for event in self._unpack(record, names):
                if wanted:
                    yield event

    def spans(self) -> list[Span]:
        """The run as spans over steps, by request in order of arrival: waiting, prefill, decode, preempted, swapped."""
        names: dict[int, str] = {}
        idle: dict[int, str] = {}  # what an unfinished request does in a step in which it computes nothing
        caught_up: dict[int, bool] = {}
        runs: dict[int, list[list[Any]]] = {}
        for record in self.records:
            self._follow(record.before, names, idle, caught_up, runs)
            working = {number for number, _ in pairs(record.work)}
            for number, otherwise in idle.items():
                what = otherwise if number not in working else "decode" if caught_up[number] else "prefill"
                run = runs[number]
                if run and run[-1][2] == what:
                    run[-1][1] = record.step + 1
                else:
                    run.append([record.step, record.step + 1, what])
            for number, _ in pairs(record.tokens):
                caught_up[number] = True
            self._follow(record.after, names, idle, caught_up, runs)
        return [Span(names[number], *piece) for number, run in runs.items() for piece in run]

    def token_times(self) -> dict[str, list[float]]:
        """When each request gained its tokens: seconds at the end of the step, request id → ascending. No token, no entry."""
        names = self.request_ids()
        times: dict[str, list[float]] = {}
        for record in self.records:
            for number, _ in pairs(record.tokens):
                times.setdefault(names[number], []).append(record.start + record.duration)
        return times

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text; as ids in brackets when the record has no decoder. Unknown tokens (below 0) are left out."""
        known = [token for token in token_ids if token >= 0]
        if self.decode is None:
            return " ".join(f"[{token}]" for token in known)
        return self.decode(known)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON lines; see `labcore.recorder.jsonl`."""
        from labcore.recorder.jsonl import save

        save(self, path)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read a record back. Raises ValueError, in one line, for a file that is foreign, truncated or too new."""
        from labcore.recorder.jsonl import load

        return load(path)

    @staticmethod
    def _follow(
        events: list[RareEvent],
        names: dict[int, str],
        idle: dict[int, str],
        caught_up: dict[int, bool],
        runs: dict[int, list[list[Any]]],
    ) -> None:
        for kind, number, _, detail in events:
            if kind == "arrive":
                forked = len(detail["tokens"]) > detail["prompt"]
                names[number], idle[number], caught_up[number], runs[number] = detail["name"], "waiting", forked, []
            elif kind in ("admit", "resume"):
                idle[number] = "waiting"
            elif kind == "preempt":
                idle[number], caught_up[number] = "preempted", False
            elif kind == "swap_out":
                idle[number] = "swapped"
            elif kind == "finish":
                del idle[number]

    def _replay(self) -> Replay:
        return Replay(self.num_blocks, self.block_size, self.policy)

    def _all_records(self) -> list[StepRecord]:
        return self.records if self.pending is None else [*self.records, self.pending]

    def _latest(self) -> Snapshot:
        if self.pending is None and self.records:
            return self.at(self.records[-1].step)
        replay = self._replay()
        for record in self._all_records():
            replay.apply(record)
        return replay.snapshot()

    @staticmethod
    def _unpack(record: StepRecord, names: dict[int, str]) -> Iterator[Event]:
        def rare(events: list[RareEvent]) -> Iterator[Event]:
            for kind, number, blocks, detail in events:
                if kind == "arrive":
                    names[number] = detail["name"]
                name = None if number is None else names[number]
                yield Event(record.step, record.start, kind, name, tuple(blocks), dict(detail or {}))

        yield from rare(record.before)
        for number, count in pairs(record.work):
            yield Event(record.step, record.start, "chunk", names[number], (), {"tokens": count})
        for number, token in pairs(record.tokens):
            yield Event(record.step, record.start, "token", names[number], (), {"token": token})
        yield from rare(record.after)
