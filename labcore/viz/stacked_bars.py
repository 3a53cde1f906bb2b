"""Stacked bars: how a whole is divided, one horizontal bar per policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labcore.viz.figure import Figure, TextView, axis, figure
from labcore.viz.style import EMPTY, FAINT, INK, PALETTE, safe, short

# In the order of the parts: used first, in a solid colour; waste after it, patterned or empty.
LOOKS = ((PALETTE[0], ""), (PALETTE[1], "x"), (EMPTY, "/"), (PALETTE[2], "."), (PALETTE[3], "-"))
NARROW = 0.045
"""Smallest share with its number inside the bar; the text view has all numbers."""


def stacked_bars(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """Stacked bars: `rows["paged"]["tokens"]` is the share of tokens under the policy "paged", from 0 to 1.

    All rows have the same parts, at most five, in the same order; otherwise raises ValueError.
    """
    parts = list(next(iter(rows.values()), {}))
    if any(list(row) != parts for row in rows.values()) or len(parts) > len(LOOKS):
        raise ValueError(f"each row must have the same parts, {len(LOOKS)} at most: {', '.join(parts)}.")
    traces = [_bars(rows, part, *look) for part, look in zip(parts, LOOKS, strict=False)]
    layout = {
        "height": 100 + 44 * max(1, len(rows)),
        "margin": {"b": 30, "t": 40},
        "barmode": "stack",
        "bargap": 0.35,
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": axis(range=[0, 1], tickformat=".0%"),
        "yaxis": axis(
            autorange="reversed", automargin=True, showgrid=False, ticklabelstandoff=8,
            tickfont={"size": 12, "color": INK},
        ),
    }  # fmt: skip
    return figure(traces, layout, stacked_bars_text(rows))


def stacked_bars_text(rows: Mapping[str, Mapping[str, float]]) -> TextView:
    """One line per row: `paged   tokens 97.8 %   in last blocks 0.6 %   free 1.7 %`."""
    width = max(map(len, rows), default=0)
    lines = [
        "   ".join([f"{name:{width}}", *(f"{part} {100 * share:5.1f} %" for part, share in row.items())])
        for name, row in rows.items()
    ]
    return TextView("\n".join(lines))


def _bars(rows: Mapping[str, Mapping[str, float]], part: str, colour: str, pattern: str) -> dict[str, Any]:
    values = [row[part] for row in rows.values()]
    return {
        "type": "bar",
        "orientation": "h",
        "name": safe(short(part, 40)),
        "x": [round(value, 6) for value in values],
        "y": [safe(short(name, 40)) for name in rows],
        "text": [f"{value:.1%}" if value >= NARROW else "" for value in values],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": INK, "size": 12},
        "hovertemplate": "%{y}<br>" + safe(short(part, 40)) + " %{x:.2%}<extra></extra>",
        "marker": {
            "color": colour, "line": {"color": FAINT, "width": 0.7},
            "pattern": {"shape": pattern, "bgcolor": colour, "fgcolor": FAINT, "fgopacity": 0.5, "size": 7},
        },
    }  # fmt: skip
