"""Pictures of a flight record: pure functions from recorded data to plotly figures, and the same facts in words."""

from labcore.viz.timeline import timeline

__all__ = ["timeline"]
