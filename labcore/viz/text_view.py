"""The facts behind each picture as a short text table: for screen readers, viewers without JavaScript, nbval."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.recorder import Recording, Span
from labcore.viz.block_map import block_map_facts
from labcore.viz.block_tables import block_tables_facts
from labcore.viz.figure import Facts
from labcore.viz.memory import memory_facts
from labcore.viz.queues import queues_facts
from labcore.viz.timeline import timeline_facts

PICTURES = {
    "block_map": block_map_facts,
    "block_tables": block_tables_facts,
    "memory": memory_facts,
    "queues": queues_facts,
}


def describe(run: Recording | Sequence[Span], step: int | None = None, picture: str = "block_map") -> Facts:
    """What `picture` shows of the run, in words, at `step` (the last one when None). Spans have a timeline only.

    picture   "block_map", "block_tables", "timeline", "memory" or "queues"
    Raises ValueError for another picture, or a step that was not recorded.
    """
    if picture == "timeline" or not isinstance(run, Recording):
        return timeline_facts(run)
    if picture not in PICTURES:
        names = ", ".join(map(repr, [*PICTURES, "timeline"]))
        raise ValueError(f"picture is {picture!r}; it must be one of {names}.")
    return PICTURES[picture](run, step)
