"""Block tables: the logical blocks of each request in a row, with an arrow from each to its physical block.

    A ana   [ 1 ][ 4 ][ 2 ]
    B bo    [ 1 ][ 5 ]
              ╲    ╲             entry 4 points to block 4
    pool    ▢  ▣  ▣  ▢  ▣  ▣
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from labcore.recorder import Recording, RequestState, Snapshot
from labcore.viz.block_map import MANY_BLOCKS
from labcore.viz.cells import Cells, Grid, block_amount, block_colour, block_hover, block_label, changes
from labcore.viz.figure import BUDGET, NOTHING, Figure, TextView, axis, chosen, columns, figure, fit, heading, nothing_recorded
from labcore.viz.style import EMPTY, FAINT, INK, PAPER, colour, letter, safe, short

MAX_ROWS = 8
MAX_COLUMNS = 12
MAX_ARROWS = 48
ELLIPSIS = 7
AXES = {"xaxis": "x", "yaxis": "y"}


@dataclass(frozen=True)
class Entry:
    """One entry of a block table, logical index → physical block, and its row and column in the figure."""

    request: RequestState
    logical: int
    block: int
    row: int
    column: int


def block_tables(
    recording: Recording,
    step: int | None = None,
    *,
    steps: Iterable[int] | None = None,
    budget: int = BUDGET,
) -> Figure:
    """Logical → physical blocks: tables of the first eight requests above, the pool below, arrows between.

    step    shown first; None means the last
    steps   offered by the slider; None means all
    budget  bytes of a notebook for the frames; steps are sampled to fit
    """
    if not recording.steps:
        return nothing_recorded()
    step, steps = chosen(recording, step, steps, budget)
    capacity = max(recording.num_blocks, len(recording.at(step).blocks))
    rows = max(1, max(min(MAX_ROWS + 1, len(recording.at(s).tables)) for s in steps))
    grid = Grid(capacity, recording.block_size, top=rows + 1)

    def layers(step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        snapshot = recording.at(step)
        shown = entries(snapshot)
        return (
            _pool(snapshot, shown, grid),
            _tables(recording, snapshot, shown, grid),
            [_gaps(snapshot, grid), _arrows(shown, grid)],
        )

    def frame(step: int) -> dict[str, Any]:
        pool, tables, rest = layers(step)
        data = [*changes(pool, moving=True), *changes(tables, moving=True), *map(_moved, rest)]
        snapshot = recording.at(step)
        layout = {"title": {"text": headline(snapshot)}, "yaxis": _row_names(snapshot, grid)}
        return {"name": str(step), "traces": list(range(len(data))), "data": data, "layout": layout}

    pool, tables, rest = layers(step)
    widest = max((entry.column + 1 for s in steps for entry in entries(recording.at(s))), default=1)
    layout = _layout(grid, widest, recording.at(step))
    frames = fit(frame, steps, step, budget)
    return figure(
        [*pool, *tables, *rest, _empty_pool(grid)], layout, block_tables_text(recording, step), frames, step
    )


def entries(snapshot: Snapshot) -> list[Entry]:
    """Entries to draw: the first eight non-empty tables; of a long one, the first seven and last four entries."""
    found = []
    holders = [request for request in snapshot.requests.values() if request.blocks]
    for row, request in enumerate(holders[:MAX_ROWS]):
        length = len(request.blocks)
        for logical, block in enumerate(request.blocks):
            if length <= MAX_COLUMNS or logical < ELLIPSIS:
                found.append(Entry(request, logical, block, row, logical))
            elif logical >= length - (MAX_COLUMNS - ELLIPSIS - 1):
                found.append(Entry(request, logical, block, row, logical - length + MAX_COLUMNS))
    return found


def headline(snapshot: Snapshot) -> str:
    """`step 12   3 tables list 14 blocks; 12 different ones, 2 shared`."""
    listed = [block for table in snapshot.tables.values() for block in table]
    return (
        f"step {snapshot.step}   {len(snapshot.tables)} tables list {len(listed)} blocks; "
        f"{len(set(listed))} different ones, {snapshot.count('shared')} shared"
    )


def block_tables_text(recording: Recording, step: int | None = None) -> TextView:
    """Each table after one step (None: the last): logical → physical, and the fill of its last block."""
    if not recording.steps:
        return NOTHING
    snapshot = recording.at(recording.steps[-1] if step is None else step)
    size = snapshot.block_size
    table = []
    holders = [request for request in snapshot.requests.values() if request.blocks]
    for request in holders[:40]:
        pieces = [f"{i}→{block}" for i, block in enumerate(request.blocks)]
        if len(pieces) > MAX_COLUMNS:
            pieces[ELLIPSIS : ELLIPSIS - MAX_COLUMNS + 1] = ["…"]
        tail = request.num_computed_tokens - (len(request.blocks) - 1) * size
        tokens = f"{request.num_computed_tokens:,} tokens"
        table.append(
            [letter(request.number), short(request.request_id), tokens, "  ".join(pieces) + f" ({tail}/{size})"]
        )
    more = [f"… and {len(holders) - 40} more"] if len(holders) > 40 else []
    return TextView("\n".join([headline(snapshot), *columns(table), *more]))


def _pool(snapshot: Snapshot, shown: list[Entry], grid: Grid) -> list[dict[str, Any]]:
    """All blocks of a small pool; of a large one, those listed by the tables above."""
    blocks = [block for block in snapshot.blocks[: grid.num_blocks] if block.state != "free"]
    if grid.num_blocks > MANY_BLOCKS:
        listed = {entry.block for entry in shown}
        blocks = [block for block in blocks if block.block in listed]
    cells = Cells(
        [grid.x(b.block) for b in blocks], [grid.base(b.block) for b in blocks], grid.block_size, AXES
    )
    return cells.layers(
        colours=[block_colour(snapshot, block) for block in blocks],
        amounts=[block_amount(block) for block in blocks],
        shared=[i for i, block in enumerate(blocks) if block.state == "shared"],
        cached=[i for i, block in enumerate(blocks) if block.state == "cached"],
        labels=[block_label(snapshot, block) for block in blocks],
        hover={"hovertext": [f"block {block.block}" for block in blocks], "hoverinfo": "text"},
        size=8 if grid.num_blocks > MANY_BLOCKS else 11,
    )


def _empty_pool(grid: Grid) -> dict[str, Any]:
    """All blocks of the pool as empty cells, in the background."""
    everywhere = range(grid.num_blocks)
    return {
        "type": "bar",
        "x": [grid.x(i) for i in everywhere],
        "base": [grid.base(i) for i in everywhere],
        "y": [grid.block_size] * grid.num_blocks,
        "width": 0.86,
        "marker": {"color": EMPTY, "line": {"color": FAINT, "width": 0.7}},
        "hovertemplate": "block %{pointNumber}<extra></extra>",
        "showlegend": False,
        "zorder": -2,
    } | AXES


def _tables(recording: Recording, snapshot: Snapshot, shown: list[Entry], grid: Grid) -> list[dict[str, Any]]:
    size = snapshot.block_size
    bases = [-round((entry.row + 1) * grid.pitch, 3) for entry in shown]
    cells = Cells([entry.column for entry in shown], bases, size, AXES)
    return cells.layers(
        colours=[colour(entry.request.number) for entry in shown],
        amounts=[max(0, min(size, e.request.num_computed_tokens - e.logical * size)) for e in shown],
        shared=[i for i, entry in enumerate(shown) if snapshot.blocks[entry.block].state == "shared"],
        cached=[],
        labels=[str(entry.block) for entry in shown],
        hover={"hovertext": [_entry_hover(recording, snapshot, entry) for entry in shown], "hoverinfo": "text"},
        size=11 if grid.num_blocks <= MANY_BLOCKS else 8,
    )


def _entry_hover(recording: Recording, snapshot: Snapshot, entry: Entry) -> str:
    where = f"logical block {entry.logical} of {safe(short(entry.request.request_id, 40))}"
    if len(snapshot.blocks) > MANY_BLOCKS:
        return f"{where}<br>block {entry.block}"
    return f"{where}<br>{block_hover(recording, snapshot, snapshot.blocks[entry.block])}"


def _gaps(snapshot: Snapshot, grid: Grid) -> dict[str, Any]:
    """An ellipsis in place of the omitted entries of a long table."""
    holders = [request for request in snapshot.requests.values() if request.blocks][:MAX_ROWS]
    long = [row for row, request in enumerate(holders) if len(request.blocks) > MAX_COLUMNS]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [ELLIPSIS] * len(long) or [None],
        "y": [_middle(row, grid) for row in long] or [None],
        "text": "…",
        "textfont": {"size": 11, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _row_names(snapshot: Snapshot, grid: Grid) -> dict[str, Any]:
    """Row labels: request of each table, first block of each row of the pool."""
    holders = [request for request in snapshot.requests.values() if request.blocks]
    names = [f"{letter(request.number)} {safe(short(request.request_id, 14))}" for request in holders[:MAX_ROWS]]
    if len(holders) > MAX_ROWS:
        names.append(f"… and {len(holders) - MAX_ROWS} more")
    every = -(-grid.rows // 20)
    pool_rows = range(0, grid.rows, every)
    return {
        "tickvals": [_middle(row, grid) for row in (*range(len(names)), *(grid.top + row for row in pool_rows))],
        "ticktext": [*names, *(str(row * grid.columns) for row in pool_rows)],
    }


def _middle(row: int, grid: Grid) -> float:
    return round(-(row + 1) * grid.pitch + grid.block_size / 2, 3)


def _arrows(shown: list[Entry], grid: Grid) -> dict[str, Any]:
    """Arrows from each entry to its block, behind the cells; in a large pool, for the first table only."""
    x: list[float | None] = []
    y: list[float | None] = []
    for entry in shown[:MAX_ARROWS] if grid.num_blocks <= MANY_BLOCKS else [e for e in shown if e.row == 0]:
        x += [entry.column, grid.x(entry.block), None]
        start = -(entry.row + 1) * grid.pitch
        y += [round(start, 3), round(grid.base(entry.block) + grid.block_size, 3), None]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": x or [None],
        "y": y or [None],
        "line": {"color": "#888", "width": 1.2},
        "marker": {
            "symbol": "arrow",
            "angleref": "previous",
            "color": "#444",
            "size": [0, 9, 0] * (len(x) // 3) or [0],
        },
        "hoverinfo": "skip",
        "showlegend": False,
        "zorder": -1,
    }


def _moved(trace: dict[str, Any]) -> dict[str, Any]:
    kept = {key: trace[key] for key in ("type", "x", "y", "text", "textposition") if key in trace}
    return kept | ({"marker": {"size": trace["marker"]["size"]}} if "marker" in trace else {})


def _layout(grid: Grid, widest: int, snapshot: Snapshot) -> dict[str, Any]:
    rows = grid.top + grid.rows
    notes = {"block tables: in logical order, each cell names a physical block": 0, "pool: physical blocks": grid.top}
    return {
        "height": 98 + max(160, min(760, rows * (46 if rows <= 8 else 38 if rows <= 12 else 26))),
        "barmode": "overlay",
        "title": heading(headline(snapshot)),
        "margin": {"t": 44, "l": 118},
        "annotations": [
            {"text": text, "x": -0.45, "y": round(-row * grid.pitch - 0.45 * (grid.pitch - grid.block_size), 3),
             "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11, "color": FAINT},
             "bgcolor": PAPER, "borderpad": 0}
            for text, row in notes.items()
        ],
        "xaxis": axis(range=[-0.6, max(widest, grid.columns) - 0.4], showgrid=False, showticklabels=False),
        "yaxis": axis(
            range=[-rows * grid.pitch - 0.1 * grid.block_size, 0.4 * grid.block_size], showgrid=False,
            **_row_names(snapshot, grid),
        ),
    }  # fmt: skip
