"""Memory: KV slots of the pool by use over time, compared with contiguous reservations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labcore.recorder import Recording, Snapshot
from labcore.viz.figure import (
    BUDGET,
    NOTHING,
    Figure,
    TextView,
    axis,
    chosen,
    columns,
    figure,
    fit,
    heading,
    held,
    nothing_recorded,
    sample,
)
from labcore.viz.style import EMPTY, FAINT, INK, hatch

MAX_POINTS = 300
BANDS = {
    "used": ("#7ad", "", "KV of one request"),
    "shared": ("#44bb99", "/", "KV that several requests read, counted once"),
    "wasted": ("#e86", "x", "allocated, still empty"),
    "cached": ("#ddd", ".", "no owner, kept for prefix hits"),
    "free": (EMPTY, "", "free"),
}


@dataclass(frozen=True)
class MemoryPoint:
    """KV slots (one per token) after one step. used + shared + wasted + cached + free = all slots of the pool.

    saved        slots saved by sharing: each further owner would need a copy
    contiguous   slots if each running request reserved max_model_len; None if unknown
    """

    step: int
    used: int
    shared: int
    wasted: int
    cached: int
    free: int
    saved: int
    contiguous: int | None


def memory_point(recording: Recording, snapshot: Snapshot) -> MemoryPoint:
    """Count the slots of one snapshot."""
    size = snapshot.block_size
    held = dict.fromkeys(("owned", "shared"), 0)
    saved = 0
    for block in snapshot.blocks:
        if block.owners:
            held[block.state] += len(block.tokens)
            saved += (block.refcount - 1) * len(block.tokens)
    busy = snapshot.count("owned") + snapshot.count("shared")
    running = len(snapshot.queues["running"])
    return MemoryPoint(
        step=snapshot.step,
        used=held["owned"],
        shared=held["shared"],
        wasted=busy * size - held["owned"] - held["shared"],
        cached=snapshot.count("cached") * size,
        free=snapshot.count("free") * size,
        saved=saved,
        contiguous=None if recording.max_model_len is None else running * recording.max_model_len,
    )


def memory(
    recording: Recording,
    step: int | None = None,
    *,
    steps: Iterable[int] | None = None,
    budget: int = BUDGET,
) -> Figure:
    """Used, shared, wasted, cached and free slots over time, stacked; the contiguous reservation as a dashed line.

    step    first position of the cursor; None means the last step
    steps   to draw; None means all, at most 300
    budget  bytes of a notebook for the frames; slider steps are sampled to fit
    """
    if not recording.steps:
        return nothing_recorded()
    step, steps = chosen(recording, step, steps)
    points = [memory_point(recording, recording.at(s)) for s in sample(steps, MAX_POINTS, keep=step)]
    by_step = {point.step: point for point in points}
    total = max(sum(getattr(point, band) for band in BANDS) for point in points)
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": band, "stackgroup": "slots",
            "x": held([point.step for point in points], 1), "y": held([getattr(point, band) for point in points]),
            "line": {"width": 0.8, "color": FAINT, "shape": "hv"}, "fillcolor": fill,
            "fillpattern": hatch(fill, shape),
            "hovertemplate": f"step %{{x}}: %{{y}} slots {band}<br>{meaning}<extra></extra>",
        }
        for band, (fill, shape, meaning) in BANDS.items()
    ]  # fmt: skip
    if recording.max_model_len is not None:
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": "contiguous<br>reservation",
                "x": held([point.step for point in points], 1), "y": held([point.contiguous for point in points]),
                "line": {"color": INK, "width": 2, "dash": "dash", "shape": "hv"},
                "hovertemplate": "step %{x}: %{y} slots if each request reserved max_model_len<extra></extra>",
            }
        )  # fmt: skip
    most = max([total, *(p.contiguous or 0 for p in points)])
    top = min(most, 8 * total)
    cursor = {
        "type": "scatter", "mode": "lines", "x": [step + 0.5] * 2, "y": [0, top], "hoverinfo": "skip",
        "line": {"color": INK, "width": 1.5, "dash": "dot"}, "showlegend": False,
    }  # fmt: skip
    traces.append(cursor)
    place = len(traces) - 1

    def frame(step: int) -> dict:
        moved = {"type": "scatter", "x": [step + 0.5] * 2}
        return {
            "name": str(step),
            "traces": [place],
            "data": [moved],
            "layout": {"title": {"text": _line(by_step[step])}},
        }

    layout = {
        "height": 358,
        "title": heading(_line(by_step[step])),
        "legend": {"traceorder": "reversed", "font": {"size": 11}},
        "xaxis": axis("step", range=[steps[0], steps[-1] + 1]),
        "yaxis": axis("KV slots (tokens)", range=[0, top * 1.04], ticklabelstandoff=4),
        "margin": {"l": 70},
    }
    frames = fit(frame, [point.step for point in points], step, budget)
    return figure(traces, layout, memory_text(recording, step, steps=steps), frames, step)


def memory_text(recording: Recording, step: int | None = None, *, steps: Iterable[int] | None = None) -> TextView:
    """Slots by use at up to eight steps of the run, including `step`."""
    if not recording.steps:
        return NOTHING
    step, steps = chosen(recording, step, steps)
    points = [memory_point(recording, recording.at(s)) for s in sample(steps, 8, keep=step)]
    head = ["step", *BANDS, "saved", "contiguous"]
    rows = [[f"{getattr(p, name, None)}" for name in head] for p in points]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = [[piece.rjust(width) for piece, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    slots = len(recording.at(step).blocks) * recording.block_size
    return TextView("\n".join([f"KV slots of {slots:,} in the pool", *columns(table)]))


def _line(point: MemoryPoint) -> str:
    busy = point.used + point.shared + point.wasted
    waste = f" ({point.wasted / busy:.0%} of what is allocated)" if busy else ""
    held_slots = f"{point.used + point.shared:,} slots hold KV, {point.wasted:,} wasted{waste}"
    return f"step {point.step}   {held_slots}, {point.saved:,} saved by sharing"
