"""The flight recorder: what a run did, step by step, as plain data. Every figure of `labcore.viz` is drawn from it.

    engine ──calls──→ Recorder ──→ Recording ──at(step)──→ Snapshot     every block, table and queue after a step
                         │             │      ──spans()──→ [Span]       the states of each request over time
                     TableDiff    JSON lines: save, load

Imports no torch and no plotly.
"""

from labcore.recorder.null_recorder import NullRecorder
from labcore.recorder.recorder import Recorder
from labcore.recorder.recording import SPAN_STATES, Event, Recording, Span
from labcore.recorder.snapshot import BlockState, RequestState, Snapshot
from labcore.recorder.step_record import EVENT_KINDS

__all__ = [
    "EVENT_KINDS",
    "SPAN_STATES",
    "BlockState",
    "Event",
    "NullRecorder",
    "Recorder",
    "Recording",
    "RequestState",
    "Snapshot",
    "Span",
]
