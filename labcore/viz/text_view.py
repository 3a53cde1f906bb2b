"""Text view: the data of each figure as a short table, for screen readers, viewers without JavaScript and nbval."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.recorder import Recording, Span
from labcore.viz.block_map import block_map_text
from labcore.viz.block_tables import block_tables_text
from labcore.viz.figure import TextView
from labcore.viz.memory import memory_text
from labcore.viz.queues import queues_text
from labcore.viz.timeline import timeline_text

TEXT_VIEWS = {
    "block_map": block_map_text,
    "block_tables": block_tables_text,
    "memory": memory_text,
    "queues": queues_text,
}


def text_view(run: Recording | Sequence[Span], step: int | None = None, figure: str = "block_map") -> TextView:
    """The data of `figure` at `step` (None: the last) as text. Spans have a timeline only.

    figure   "block_map", "block_tables", "timeline", "memory" or "queues"
    Raises ValueError for another figure, or a step that was not recorded.
    """
    if figure == "timeline" or not isinstance(run, Recording):
        return timeline_text(run)
    if figure not in TEXT_VIEWS:
        names = ", ".join(map(repr, [*TEXT_VIEWS, "timeline"]))
        raise ValueError(f"figure is {figure!r}; it must be one of {names}.")
    return TEXT_VIEWS[figure](run, step)
