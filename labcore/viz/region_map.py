"""Region map: contiguous regions of a KV buffer over time, and the holes between them. Drawn in notebook 01.

    slots ▲   ┌──────────────┐            box: region of one request while it is resident
          │   │ reserved  ╱▒▒│ ┌──────┐   shaded: tokens stored so far
          │   │        ╱▒▒▒▒▒│ │ bo ▒▒│   between the boxes: free
          └───┴──────────────┴─┴──────┴─▶ steps
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from labcore.viz.figure import Figure, TextView, axis, figure
from labcore.viz.style import FAINT, INK, SPANS, safe, short

if TYPE_CHECKING:
    from labcore.baseline.naive import Residency

NUM_SAMPLES = 6


def region_map(stays: Sequence[Residency], num_slots: int, names: Sequence[str] = ()) -> Figure:
    """Regions as boxes over steps (x) and slots (y), each shaded up to its stored tokens.

    names   label of each box; none by default
    """
    stop = max((stay.stop for stay in stays), default=1)
    boxes = [_outline(stay) for stay in stays]
    fills = [_filled(stay) for stay in stays]
    hovers = [_hover(stay, name) for stay, name in zip_longest(stays, names, fillvalue="")]
    traces = [
        _polygons(boxes, "reserved, empty", "#ffffff", "-"),
        _polygons(fills, "tokens", SPANS["decode"][1], ""),
        {
            "type": "scatter", "mode": "text" if names else "markers", "showlegend": False,
            "x": [(stay.start + stay.stop) / 2 for stay in stays],
            "y": [stay.region.start + stay.request.prompt_tokens / 2 for stay in stays],
            "text": [safe(short(name, 12)) for name in names], "textfont": {"color": INK, "size": 12},
            "marker": {"size": 6, "color": FAINT, "symbol": "line-ew-open"},
            "hovertext": hovers, "hoverinfo": "text",
        },
    ]  # fmt: skip
    layout = {
        "height": 380,
        "xaxis": axis("step", range=[0, stop]),
        "yaxis": axis("slot", range=[0, num_slots]),
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    }
    return figure(traces, layout, region_map_text(stays, num_slots, names))


def region_map_text(stays: Sequence[Residency], num_slots: int, names: Sequence[str] = ()) -> TextView:
    """With names, the region of each request: `ana   slots 0–7   steps 0–3   5 tokens grow to 8 of 8`.

    Without, the free slots at a few steps: `step   500   4,768 slots free, 7 holes, the largest 2,100`.
    """
    stop = max((stay.stop for stay in stays), default=0)
    lines = [f"{num_slots:,} slots, {len(stays)} requests, {stop:,} steps"]
    width = max((len(short(name, 12)) for name in names), default=0)
    for stay, name in zip(stays, names, strict=False):
        lines.append(f"  {short(name, 12):{width}}  {_place(stay)}")
    if stays and not names:
        steps = sorted({stop * part // NUM_SAMPLES for part in range(NUM_SAMPLES)})
        lines += [_free_at(stays, num_slots, step) for step in steps]
    return TextView("\n".join(lines))


def _free_at(stays: Sequence[Residency], num_slots: int, step: int) -> str:
    held = sorted(stay.region for stay in stays if stay.start <= step < stay.stop)
    edges = [0, *(edge for region in held for edge in (region.start, region.stop)), num_slots]
    holes = [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
    return f"  step {step:5,}   {sum(holes):6,} slots free, {len(holes)} holes, the largest {max(holes, default=0):,}"


def _place(stay: Residency) -> str:
    region, request = stay.region, stay.request
    return (
        f"slots {region.start:,}–{region.stop - 1:,}   steps {stay.start:,}–{stay.stop - 1:,}   "
        f"{request.prompt_tokens:,} tokens grow to {_final(stay):,} of {region.size:,}"
    )


def _hover(stay: Residency, name: str) -> str:
    return (f"{safe(short(name, 60))}<br>" if name else "") + _place(stay).replace("   ", "<br>")


def _final(stay: Residency) -> int:
    """Tokens stored in the last step; the last output token is not stored."""
    return stay.request.prompt_tokens + stay.stop - stay.start - 1


def _outline(stay: Residency) -> list[tuple[int, int]]:
    low, high = stay.region.start, stay.region.stop
    return [(stay.start, low), (stay.start, high), (stay.stop, high), (stay.stop, low), (stay.start, low)]


def _filled(stay: Residency) -> list[tuple[int, int]]:
    low = stay.region.start
    first, last = low + stay.request.prompt_tokens, low + _final(stay)
    return [(stay.start, low), (stay.start, first), (stay.stop, last), (stay.stop, low), (stay.start, low)]


def _polygons(shapes: list[list[tuple[int, int]]], name: str, fill: str, pattern: str) -> dict[str, Any]:
    """Many closed outlines in one trace, separated by None, to keep the figure small."""
    points = [point for shape in shapes for point in [*shape, (None, None)]][:-1]
    trace = {
        "type": "scatter", "mode": "lines", "name": name, "fill": "toself", "fillcolor": fill, "hoverinfo": "skip",
        "x": [x for x, _ in points], "y": [y for _, y in points], "line": {"color": FAINT, "width": 0.8},
    }  # fmt: skip
    if pattern:
        trace["fillpattern"] = {"shape": pattern, "fgcolor": FAINT, "bgcolor": fill, "size": 6, "solidity": 0.15}
    return trace
