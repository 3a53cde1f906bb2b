"""Figures of a flight record: pure functions from recorded data to plotly figures, each with a text view.

    block_map(recorder)              the pool as a grid of cells              text_view(recorder, step)
    block_tables(recorder)           logical → physical, with arrows          text_view(recorder, step, "block_tables")
    timeline(recorder or spans, …)   requests over steps                      text_view(recorder, figure="timeline")
    memory(recorder)                 slots used, wasted, shared, free         text_view(recorder, step, "memory")
    queues(recorder)                 waiting, running and swapped requests    text_view(recorder, step, "queues")
    explore(llm)                     a live panel around them                 (labcore.viz.explorer)
"""

from labcore.viz.block_map import block_map
from labcore.viz.block_tables import block_tables
from labcore.viz.figure import Figure
from labcore.viz.memory import memory
from labcore.viz.queues import queues
from labcore.viz.text_view import text_view
from labcore.viz.timeline import timeline

__all__ = ["Figure", "block_map", "block_tables", "text_view", "explore", "memory", "queues", "timeline"]


def __getattr__(name: str) -> object:
    """Import `explore` on demand: it needs ipywidgets, the figures do not."""
    if name == "explore":
        from labcore.viz.explorer import explore

        return explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
