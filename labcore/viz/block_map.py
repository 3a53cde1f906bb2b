"""Block map: the block pool as a grid of cells, with owners and fill of each block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from labcore.recorder import Recording, Snapshot
from labcore.viz.cells import Cells, Grid, block_amount, block_colour, block_hover, block_label, block_line, changes, legend
from labcore.viz.figure import BUDGET, NOTHING, Figure, TextView, axis, chosen, columns, figure, fit, heading, nothing_recorded
from labcore.viz.style import FAINT

MAX_LINES = 40
MANY_BLOCKS = 160
"""Above this, frames show owners only on hover and do not dot cached blocks; a single step shows everything."""
AXES = {"xaxis": "x", "yaxis": "y"}


def block_map(
    recording: Recording,
    step: int | None = None,
    *,
    steps: Iterable[int] | None = None,
    budget: int = BUDGET,
) -> Figure:
    """The pool after each step, one cell per block: colour and letter of its owner, hatched if shared, filled to its tokens.

    step    shown first; None means the last
    steps   offered by the slider; None means all
    budget  bytes of a notebook for the frames; steps are sampled to fit
    """
    if not recording.steps:
        return nothing_recorded()
    step, steps = chosen(recording, step, steps, budget)
    capacity = max(recording.num_blocks, len(recording.at(step).blocks))
    grid = Grid(capacity, recording.block_size)
    everywhere = range(capacity)
    cells = Cells(
        [grid.x(i) for i in everywhere], [grid.base(i) for i in everywhere], recording.block_size, AXES
    )
    thin = capacity > MANY_BLOCKS and len(steps) > 1

    def frame(step: int) -> dict[str, Any]:
        snapshot = recording.at(step)
        layers = changes(_layers(recording, snapshot, cells, thin))
        return {
            "name": str(step), "traces": [0, 1, 2, 3], "data": layers,
            "layout": {"title": {"text": headline(snapshot)}},
        }  # fmt: skip

    entries = legend(recording.request_ids())
    snapshot = recording.at(step)
    traces = [
        *_layers(recording, snapshot, cells, thin),
        *([_block_ids(grid)] if capacity <= MANY_BLOCKS else []),
        *entries,
    ]
    layout = _layout(grid, headline(snapshot), len(entries))
    return figure(traces, layout, block_map_text(recording, step), fit(frame, steps, step, budget), step)


def headline(snapshot: Snapshot) -> str:
    """`step 12   24 blocks: 15 owned, 3 shared, 2 cached, 4 free`, and the number of leaked blocks."""
    counts = {state: snapshot.count(state) for state in ("owned", "shared", "cached", "free")}
    lost = snapshot.leaked
    counts["free"] -= max(0, lost)
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    note = f", {lost} taken by no request" if lost > 0 else f", {-lost} free but listed by a table" if lost else ""
    return f"step {snapshot.step}   {len(snapshot.blocks)} blocks: {said}{note}"


def block_map_text(recording: Recording, step: int | None = None) -> TextView:
    """The pool after one step (None: the last), one line per block that is not free."""
    if not recording.steps:
        return NOTHING
    snapshot = recording.at(recording.steps[-1] if step is None else step)
    blocks = [block for block in snapshot.blocks if block.state != "free"]
    table = [[f"block {block.block:>3}", *block_line(recording, snapshot, block)] for block in blocks[:MAX_LINES]]
    lines = [headline(snapshot), *columns(table)]
    if len(blocks) > MAX_LINES:
        lines.append(f"… and {len(blocks) - MAX_LINES} more blocks that are not free")
    return TextView("\n".join(lines))


def _layers(
    recording: Recording, snapshot: Snapshot, cells: Cells, thin: bool
) -> list[dict[str, Any]]:
    blocks = snapshot.blocks[: len(cells.x)]
    if thin:
        hover = {"hovertemplate": "block %{pointNumber} %{text}<extra></extra>", "hoverinfo": "all"}
    else:
        hover = {"hovertext": [block_hover(recording, snapshot, block) for block in blocks], "hoverinfo": "text"}
    return cells.layers(
        colours=[block_colour(snapshot, block) for block in blocks],
        amounts=[block_amount(block) for block in blocks],
        shared=[block.block for block in blocks if block.state == "shared"],
        cached=[] if thin else [block.block for block in blocks if block.state == "cached"],
        labels=[block_label(snapshot, block) for block in blocks],
        hover=hover,
        size=13 if len(blocks) <= 40 else 11 if len(blocks) <= MANY_BLOCKS else 8,
    )


def _block_ids(grid: Grid) -> dict[str, Any]:
    everywhere = range(grid.num_blocks)
    return {
        "type": "scatter",
        "mode": "text",
        "x": [round(grid.x(i) - 0.43, 2) for i in everywhere],
        "y": [round(grid.base(i) + grid.block_size, 3) for i in everywhere],
        "text": [str(i) for i in everywhere],
        "textposition": "top right",
        "textfont": {"size": 9, "color": FAINT},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _layout(grid: Grid, title: str, num_entries: int) -> dict[str, Any]:
    """Figure layout; the height fits the rows of blocks and the legend."""
    step = -(-grid.rows // 20)
    rows = range(0, grid.rows, step)
    rows_height = grid.rows * (66 if grid.rows <= 5 else 48 if grid.rows <= 10 else 30)
    return {
        "height": 96 + max(min(620, rows_height), 20 * num_entries),
        "barmode": "overlay",
        "title": heading(title),
        "legend": {"itemclick": False, "itemdoubleclick": False, "font": {"size": 11}, "traceorder": "normal"},
        "margin": {"t": 40, "l": 46},
        "xaxis": axis(
            range=[-0.6, grid.columns - 0.4], showgrid=False, tickvals=_ticks(grid.columns),
            ticktext=[f"+{i}" for i in _ticks(grid.columns)],
        ),
        "yaxis": axis(
            range=[-grid.rows * grid.pitch - 0.1 * grid.block_size, 0.1 * grid.block_size], showgrid=False,
            tickvals=[grid.base(i * grid.columns) + grid.block_size / 2 for i in rows],
            ticktext=[str(i * grid.columns) for i in rows],
        ),
    }  # fmt: skip


def _ticks(columns: int) -> list[int]:
    every = 1 if columns <= 16 else 5
    return list(range(0, columns, every))
