"""Prefix tree: the cached blocks as a tree of token prefixes, above the pool that holds them.

    [0]──[1]──[2]      one row per text, one cell per block, labelled with the physical block
      │    └─[4]       rows branch where texts diverge
      └─[6]──[7]
    pool  ▣ ▣ ▣ ▢ ▣ …

Flight records have no parent links: the parent of a block is taken from block tables and kept while the block is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labcore.recorder import BlockState, Recording, Snapshot
from labcore.viz.cells import Cells, Grid, block_amount, block_colour, block_hover, block_label, block_line, legend
from labcore.viz.figure import NOTHING, Figure, TextView, axis, columns, figure, heading, nothing_recorded
from labcore.viz.style import FAINT, PAPER

MAX_LINES = 40
AXES = {"xaxis": "x", "yaxis": "y"}


@dataclass(frozen=True)
class Node:
    """A cached block with its parent block, its depth in the text, and the row of that text."""

    block: BlockState
    parent: int | None
    depth: int
    row: int


def prefix_tree(recording: Recording, step: int | None = None) -> Figure:
    """The tree of cached blocks after a step (None: the last), above the pool.

    Raises ValueError if `step` was not recorded.
    """
    if not recording.steps:
        return nothing_recorded()
    snapshot = recording.at(recording.steps[-1] if step is None else step)
    nodes = tree(recording, snapshot.step)
    rows = 1 + max((node.row for node in nodes), default=0)
    grid = Grid(len(snapshot.blocks), recording.block_size, top=rows + 1)
    traces = [
        _edges(nodes, grid),
        *_tree_cells(recording, snapshot, nodes, grid),
        *_pool_cells(recording, snapshot, grid),
    ]
    layout = _layout(grid, 1 + max((node.depth for node in nodes), default=0), headline(nodes))
    traces += legend(recording.request_ids())
    return figure(traces, layout, prefix_tree_text(recording, step))


def prefix_tree_text(recording: Recording, step: int | None = None) -> TextView:
    """The tree as text: one line per block, indented under its parent, with owners and text."""
    if not recording.steps:
        return NOTHING
    snapshot = recording.at(recording.steps[-1] if step is None else step)
    nodes = tree(recording, snapshot.step)
    table = []
    for node in nodes[:MAX_LINES]:
        owners, _, _, text, *_ = block_line(recording, snapshot, node.block)
        table.append(["   " * node.depth + f"block {node.block.block}", text, owners])
    more = [f"… and {len(nodes) - MAX_LINES} more"] if len(nodes) > MAX_LINES else []
    return TextView(
        "\n".join([f"step {snapshot.step}   {headline(nodes)}", *columns(table), *more] if table else [headline(nodes)])
    )


def headline(nodes: list[Node]) -> str:
    """`7 blocks can be found, in 3 texts`."""
    return f"{len(nodes)} blocks can be found, in {1 + max((node.row for node in nodes), default=-1)} texts"


def tree(recording: Recording, step: int) -> list[Node]:
    """All cached blocks after `step`, parents before children; the blocks of a text share a row."""
    parents = _parents(recording, step)
    blocks = recording.at(step).blocks
    children: dict[int | None, list[int]] = {}
    for block, parent in sorted(parents.items()):
        children.setdefault(parent if parent in parents else None, []).append(block)

    def walk(parent: int | None, depth: int, row: int) -> Iterator[Node]:
        for block in children.get(parent, ()):
            below = list(walk(block, depth + 1, row))
            yield Node(blocks[block], parent, depth, row)
            yield from below
            row = 1 + max((node.row for node in below), default=row)

    return list(walk(None, 0, 0))


def _parents(recording: Recording, step: int) -> dict[int, int | None]:
    """Cached block → its parent, as seen in block tables up to `step`."""
    parents: dict[int, int | None] = {}
    for snapshot in recording.snapshots([s for s in recording.steps if s <= step]):
        cached = {block.block for block in snapshot.blocks if block.hash is not None}
        parents = {block: parent for block, parent in parents.items() if block in cached}
        for table in snapshot.tables.values():
            parents.update((b, a) for a, b in zip([None, *table], table, strict=False) if b in cached)
    return parents


def _tree_cells(recording: Recording, snapshot: Snapshot, nodes: list[Node], grid: Grid) -> list[dict[str, Any]]:
    bases = [-round((node.row + 1) * grid.pitch, 3) for node in nodes]
    cells = Cells([node.depth for node in nodes], bases, grid.block_size, AXES)
    labels = [str(node.block.block) for node in nodes]
    return _layers(recording, snapshot, [node.block for node in nodes], cells, labels)


def _pool_cells(recording: Recording, snapshot: Snapshot, grid: Grid) -> list[dict[str, Any]]:
    everywhere = range(grid.num_blocks)
    cells = Cells([grid.x(i) for i in everywhere], [grid.base(i) for i in everywhere], grid.block_size, AXES)
    labels = [block_label(snapshot, block) for block in snapshot.blocks]
    return _layers(recording, snapshot, list(snapshot.blocks), cells, labels)


def _layers(
    recording: Recording, snapshot: Snapshot, blocks: list[BlockState], cells: Cells, labels: list[str]
) -> list[dict[str, Any]]:
    return cells.layers(
        colours=[block_colour(snapshot, block) for block in blocks],
        amounts=[block_amount(block) for block in blocks],
        shared=[i for i, block in enumerate(blocks) if block.state == "shared"],
        cached=[i for i, block in enumerate(blocks) if block.state == "cached"],
        labels=labels,
        hover={"hovertext": [block_hover(recording, snapshot, block) for block in blocks], "hoverinfo": "text"},
        size=13 if len(snapshot.blocks) <= 40 else 10,
    )


def _edges(nodes: list[Node], grid: Grid) -> dict[str, Any]:
    """Edges: down from the row of the parent, then across to the child."""
    at = {node.block.block: node for node in nodes}

    def middle(node: Node) -> float:
        return round(-(node.row + 1) * grid.pitch + grid.block_size / 2, 3)

    x: list[float | None] = []
    y: list[float | None] = []
    for node in nodes:
        parent = at.get(node.parent)
        if parent is not None:
            x += [parent.depth, parent.depth, node.depth, None]
            y += [middle(parent), middle(node), middle(node), None]
    return {
        "type": "scatter", "mode": "lines", "x": x or [None], "y": y or [None], "line": {"color": FAINT, "width": 1.5},
        "hoverinfo": "skip", "showlegend": False, "zorder": -1,
    }  # fmt: skip


def _layout(grid: Grid, widest: int, title: str) -> dict[str, Any]:
    rows = grid.top + grid.rows
    notes = {"prefix tree: each cell names its block": 0, "pool: each cell names its owners": grid.top}
    return {
        "height": 150 + max(160, min(760, rows * (46 if rows <= 8 else 34))),
        "barmode": "overlay",
        "title": heading(title),
        "margin": {"t": 44, "l": 30},
        "annotations": [
            {"text": text, "x": -0.45, "y": round(-row * grid.pitch - 0.45 * (grid.pitch - grid.block_size), 3),
             "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11, "color": FAINT},
             "bgcolor": PAPER, "borderpad": 0}
            for text, row in notes.items()
        ],
        "xaxis": axis(range=[-0.6, max(widest, grid.columns) - 0.4], showgrid=False, showticklabels=False),
        "yaxis": axis(
            range=[-rows * grid.pitch - 0.1 * grid.block_size, 0.4 * grid.block_size], showgrid=False,
            showticklabels=False,
        ),
    }  # fmt: skip
