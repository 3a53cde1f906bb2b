"""A flight record: one `StepRecord` per step, and the queries over it.

`events()` unpacks the records into plain events, `at()` replays them into a snapshot, `spans()` turns them into a
timeline. Used in every notebook.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labcore.recorder import jsonl
from labcore.recorder.snapshot import Replay, Snapshot
from labcore.recorder.step_record import RawEvent, StepRecord, pairs

SPAN_STATES = ("waiting", "prefill", "decode", "preempted", "swapped", "idle")


@dataclass(frozen=True)
class Span:
    """One request in one state during [start, stop), in steps, or in seconds if all spans use them.

    Raises ValueError if `state` is not in SPAN_STATES or `stop` precedes `start`.
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


@dataclass(frozen=True)
class Event:
    """One event: `kind` is in EVENT_KINDS, `time` is the start of its step in seconds.

    request   request id, or None for an event of the pool
    blocks    physical blocks; copy_on_write has (source, copy)
    detail    fields of this kind of event: tokens, token, reason, …
    """

    step: int
    time: float
    kind: str
    request: str | None
    blocks: tuple[int, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


class Recording:
    """A flight record to be queried. `Recorder` writes one; `Recording.load` reads one from a file.

    decode   token ids → text; None shows ids. A loaded record decodes with the token texts in its file.
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
        self.pending: StepRecord | None = None  # events since the last completed step
        self._cursor = (0, self._replay())  # records applied so far, and the resulting state
        self._last: Snapshot | None = None

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps, ascending; each is valid for `at`."""
        return [record.step for record in self.records]

    def at(self, step: int | None = None) -> Snapshot:
        """The state after `step`, or the latest state if None. Going forward replays only the new steps.

        Raises ValueError if `step` was not recorded.
        """
        if step is None:
            return self._latest()
        if self._last is not None and self._last.step == step:
            return self._last
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
        self._last = replay.snapshot()
        return self._last

    def request_ids(self) -> list[str]:
        """Request ids in order of arrival, indexed by request number. An id may occur twice."""
        return [
            detail["name"]
            for record in self._all_records()
            for kind, _, _, detail in (*record.planned, *record.updated)
            if kind == "arrive"
        ]

    def snapshots(self, steps: Iterable[int] | None = None) -> Iterator[Snapshot]:
        """A snapshot after each of `steps` (ascending; None means all), in one pass."""
        for step in self.steps if steps is None else steps:
            yield self.at(step)

    def events(self, step: int | None = None) -> Iterator[Event]:
        """All events in order, or those of one step."""
        names: dict[int, str] = {}
        for record in self._all_records():
            wanted = step is None or record.step == step
            for event in self._unpack(record, names):
                if wanted:
                    yield event

    def spans(self) -> list[Span]:
        """The run as spans over steps, grouped by request in order of arrival."""
        names: dict[int, str] = {}
        idle: dict[int, str] = {}  # state of an unfinished request in a step without a chunk for it
        caught_up: dict[int, bool] = {}
        runs: dict[int, list[list[Any]]] = {}
        for record in self.records:
            self._apply_states(record.planned, names, idle, caught_up, runs)
            working = {number for number, _ in pairs(record.chunks)}
            for number, otherwise in idle.items():
                what = otherwise if number not in working else "decode" if caught_up[number] else "prefill"
                run = runs[number]
                if run and run[-1][2] == what:
                    run[-1][1] = record.step + 1
                else:
                    run.append([record.step, record.step + 1, what])
            for number, _ in pairs(record.tokens):
                caught_up[number] = True
            self._apply_states(record.updated, names, idle, caught_up, runs)
        return [Span(names[number], *piece) for number, run in runs.items() for piece in run]

    def token_times(self) -> dict[str, list[float]]:
        """Request id → times of its tokens, ascending: seconds at the end of the step. Requests without tokens are absent."""
        names = self.request_ids()
        times: dict[str, list[float]] = {}
        for record in self.records:
            for number, _ in pairs(record.tokens):
                times.setdefault(names[number], []).append(record.start + record.duration)
        return times

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, or as ids in brackets without a decoder. Unknown tokens (below 0) are skipped."""
        known = [token for token in token_ids if token >= 0]
        if self.decode is None:
            return " ".join(f"[{token}]" for token in known)
        return self.decode(known)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON lines (`labcore.recorder.jsonl`), events since the last step included."""
        header = {name: getattr(self, name) for name in jsonl.HEADER_FIELDS}
        jsonl.save(path, header, self.records, self.pending, self.decode)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read a record. Raises ValueError, in one line, for a foreign file, a truncated one or another version."""
        header, records, pending, decode = jsonl.load(path)
        recording = Recording(**header, decode=decode)
        recording.records, recording.pending = records, pending
        return recording

    @staticmethod
    def _apply_states(
        events: list[RawEvent],
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
        def rare(events: list[RawEvent]) -> Iterator[Event]:
            for kind, number, blocks, detail in events:
                if kind == "arrive":
                    names[number] = detail["name"]
                name = None if number is None else names[number]
                yield Event(record.step, record.start, kind, name, tuple(blocks), dict(detail or {}))

        yield from rare(record.planned)
        for number, count in pairs(record.chunks):
            yield Event(record.step, record.start, "chunk", names[number], (), {"tokens": count})
        for number, token in pairs(record.tokens):
            yield Event(record.step, record.start, "token", names[number], (), {"token": token})
        yield from rare(record.updated)
