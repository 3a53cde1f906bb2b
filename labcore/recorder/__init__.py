"""The flight recorder: what a run did, step by step, as plain data; it is behind every picture.

    engine ──calls──→ Recorder ──→ Recording ──at(step)──→ Snapshot     every block, table and queue after a step
                         │             │      ──spans()──→ [Span]       what each request did, over time
                      ledger         file: JSON lines, out and in

No torch and no pictures here. `labcore.viz` draws.
"""

from labcore.recorder.recorder import Recorder
from labcore.recorder.recording import EVENT_KINDS, SPAN_STATES, Event, Recording, Span
from labcore.recorder.snapshot import BlockState, RequestState, Snapshot

__all__ = [
    "EVENT_KINDS",
    "SPAN_STATES",
    "BlockState",
    "Event",
    "Recorder",
    "Recording",
    "RequestState",
    "Snapshot",
    "Span",
]
