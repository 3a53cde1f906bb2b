"""Cells: how figures draw KV blocks, and the position of each block in the pool's grid.

    ┌────┐     ▨ hatched: more than one owner        letter: owner
    │ AB │     ░ dotted:  cached, no owner           height of the fill: slots of the block that hold KV
    │▨▨▨▨│
    └────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labcore.recorder import BlockState, Recording, Snapshot
from labcore.viz.style import CACHED, EMPTY, FAINT, INK, colour, hatch, letter, safe, short

GAP = 0.55
CLEAR = "rgba(0,0,0,0)"
LEGEND_REQUESTS = 12


@dataclass(frozen=True)
class Grid:
    """Block id → position. Rows go down from row `top`, block 0 at its left; a cell is 1 wide, `block_size` high."""

    num_blocks: int
    block_size: int
    top: int = 0

    @property
    def columns(self) -> int:
        for most, columns in ((10, self.num_blocks), (40, 8), (160, 16), (400, 25)):
            if self.num_blocks <= most:
                return max(1, columns)
        return 40

    @property
    def rows(self) -> int:
        return -(-self.num_blocks // self.columns)

    @property
    def pitch(self) -> float:
        """Height of a row including the gap above it."""
        return round(self.block_size * (1 + GAP), 3)

    def x(self, block: int) -> int:
        return block % self.columns

    def base(self, block: int) -> float:
        """Bottom of the cell."""
        return -round((self.top + block // self.columns + 1) * self.pitch, 3)


@dataclass(frozen=True)
class Cells:
    """Fixed positions of cells, and the four layers that draw their contents: cells, hatches, covers, letters.

    A cell is painted whole and its empty part covered; a covered letter is drawn again on top. Most blocks are full or
    free, so frames store few covers. All lists have one entry per cell.
    """

    x: Sequence[float]
    base: Sequence[float]
    height: int
    axes: dict[str, str]

    def layers(
        self,
        colours: Sequence[str],
        amounts: Sequence[int],
        shared: Sequence[int],
        cached: Sequence[int],
        labels: Sequence[str],
        hover: dict[str, Any],
        size: int,
    ) -> list[dict[str, Any]]:
        """colours; amounts 0 … height; indices of shared and cached cells; labels of `size` points; hover settings."""
        covered = [i for i, amount in enumerate(amounts) if 0 < amount < self.height]
        silent = {"hoverinfo": "skip", "showlegend": False} | self.axes
        bars = {"type": "bar", "width": 0.86} | silent
        outline = {"color": FAINT, "width": 0.7}
        font = {"color": INK, "size": size}
        cells = bars | {
            "x": list(self.x), "base": list(self.base), "y": [self.height] * len(self.x),
            "text": ["" if 0 < amount < self.height else label for amount, label in zip(amounts, labels, strict=True)],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
            "insidetextfont": font, "marker": {"color": list(colours), "line": outline},
        }  # fmt: skip
        hatches = bars | {
            "x": [self.x[i] for i in (*shared, *cached)] or [None],
            "base": [self.base[i] for i in (*shared, *cached)] or [None],
            "y": [self.height] * (len(shared) + len(cached)) or [None],
        }
        pattern = hatch(CLEAR, "") | {"shape": ["/"] * len(shared) + ["."] * len(cached)}
        hatches["marker"] = {"color": CLEAR, "line": {"width": 0}, "pattern": pattern}
        covers = bars | {
            "x": [self.x[i] for i in covered] or [None],
            "base": [self.base[i] + amounts[i] for i in covered] or [None],
            "y": [self.height - amounts[i] for i in covered] or [None],
            "marker": {"color": EMPTY, "line": outline},
        }
        letters = silent | {
            "type": "scatter", "mode": "text", "textfont": font,
            "x": [self.x[i] for i in covered] or [None],
            "y": [self.base[i] + self.height / 2 for i in covered] or [None],
            "text": [labels[i] for i in covered] or [""],
        }  # fmt: skip
        return [cells | hover, hatches, covers, letters]


def changes(layers: Sequence[dict[str, Any]], moving: bool = False) -> list[dict[str, Any]]:
    """The properties that a frame must store; the rest is in the figure once. moving: positions of cells change too."""
    cells, hatches, covers, letters = layers
    painted = {key: cells[key] for key in ("text", "hovertext") if key in cells}
    painted |= _places(cells) if moving else {}
    return [
        {"type": "bar", "marker": {"color": cells["marker"]["color"]}} | painted,
        {"type": "bar", "marker": {"pattern": {"shape": hatches["marker"]["pattern"]["shape"]}}} | _places(hatches),
        {"type": "bar"} | _places(covers),
        {"type": "scatter"} | {key: letters[key] for key in ("x", "y", "text")},
    ]


def _places(trace: dict[str, Any]) -> dict[str, Any]:
    return {key: trace[key] for key in ("x", "base", "y")}


def block_colour(snapshot: Snapshot, block: BlockState) -> str:
    """Colour of the first owner; grey for cached, white for free."""
    if block.owners:
        return colour(snapshot.requests[block.owners[0][0]].number)
    return CACHED if block.state == "cached" else EMPTY


def block_amount(block: BlockState) -> int:
    """Number of tokens to draw; 0 for a free block, whose old KV is unreachable."""
    return 0 if block.state == "free" else len(block.tokens)


def block_label(snapshot: Snapshot, block: BlockState) -> str:
    """Letters of up to three owners, "×40" for more; "#" for a cached block, "" for a free one."""
    if not block.owners:
        return "#" if block.state == "cached" else ""
    letters = "".join(letter(snapshot.requests[name].number) for name, _ in block.owners[:4])
    return letters if block.refcount == 1 or len(letters) <= 3 else f"×{block.refcount}"


def block_line(recording: Recording, snapshot: Snapshot, block: BlockState, length: int = 24) -> list[str]:
    """Columns of one block in a text view: owners, refcount, fill, text, hash."""
    owners = " ".join(f"{short(name)}({index})" for name, index in block.owners) or block.state
    pieces = [owners, f"refcount {block.refcount}", f"{block_amount(block)}/{snapshot.block_size}"]
    text = recording.text(block.tokens)
    pieces.append(f"“{short(text, length)}”" if text and block.state != "free" else "")
    pieces.append(f"hash {block.hash[:8]}" if block.hash else "")
    return pieces


def block_hover(recording: Recording, snapshot: Snapshot, block: BlockState) -> str:
    """Hover text of one block."""
    lines = [f"<b>block {block.block}</b> · {block.state}"]
    if block.state == "free":
        return f"{lines[0]}<br>since step {block.since}" if block.since else lines[0]
    lines += [f"{safe(short(name, 40))}, logical block {index}" for name, index in block.owners[:6]]
    if block.refcount > 6:
        lines.append(f"… and {block.refcount - 6} more owners")
    lines.append(f"refcount {block.refcount} · {block_amount(block)}/{snapshot.block_size} tokens")
    text = recording.text(block.tokens)
    if text:
        lines.append(f"“{safe(short(text, 60))}”")
    if block.hash:
        lines.append(f"hash {safe(block.hash[:16])}")
    lines.append(f"so since step {block.since}")
    return "<br>".join(lines)


def legend(request_ids: Sequence[str], states: Sequence[str] = ("shared", "cached", "free")) -> list[dict[str, Any]]:
    """Legend entries, as traces without data: patterns, and the letter of each request."""
    looks = {"shared": ("/", EMPTY, "shared"), "cached": (".", CACHED, "# cached, free"), "free": ("", EMPTY, "free")}
    entries = [looks[state] for state in states]
    named = enumerate(request_ids[:LEGEND_REQUESTS])
    entries += [("", colour(number), f"{letter(number)} {short(name)}") for number, name in named]
    traces = [
        {
            "type": "bar", "x": [None], "y": [None], "name": safe(name), "hoverinfo": "skip",
            "marker": {"color": fill, "line": {"color": FAINT, "width": 0.7},
                       "pattern": hatch(fill, shape)},
        }
        for shape, fill, name in entries
    ]  # fmt: skip
    if len(request_ids) > LEGEND_REQUESTS:
        more = f"… and {len(request_ids) - LEGEND_REQUESTS} more"
        blank = {"type": "scatter", "mode": "lines", "line": {"color": CLEAR}, "hoverinfo": "skip"}
        traces.append(blank | {"x": [None], "y": [None], "name": more})
    return traces
