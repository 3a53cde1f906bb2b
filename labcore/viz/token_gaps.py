"""Token gaps: times between tokens (TBT), one row per stream; a long gap is drawn as a bar with its length.

    whole prompts   s0   |  |  |  |▨▨▨▨▨▨▨ 2.3 ▨▨▨▨▨▨▨|  |  |
                    s1   |  |  |  |▨▨▨▨▨▨▨ 2.3 ▨▨▨▨▨▨▨|  |  |
    chunks          s0   |  |  |  |   |   |   |   |  |  |  |
                               ┆ the prompt arrives

A run maps the name of each stream to the times of its tokens, as `Recording.token_times` returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labcore.viz.figure import Figure, TextView, axis, figure
from labcore.viz.style import FAINT, INK, SPANS, hatch, safe, short
from labcore.workload.metrics import percentile

TokenTimes = Mapping[str, Sequence[float]]
MAX_ROWS = 40
LONG = 2.0
"""Default threshold of a long gap, in median gaps."""
NARROW = 0.035
"""Smallest share of the width with the length inside the bar; hover and text view have all lengths."""


def token_gaps(
    *runs: TokenTimes,
    titles: Sequence[str] = (),
    marks: Sequence[Mapping[str, float]] = (),
    unit: str = "s",
    long: float | None = None,
) -> Figure:
    """One panel per run on a common time axis; one row per stream, one tick per token.

    runs     name of a stream → times of its tokens, ascending
    titles   one per run
    marks    one per run: event → time, drawn as lines across the panel
    unit     of all times
    long     threshold of a long gap; None means twice the median gap of the first run
    Raises ValueError if there is no run, or a run without gaps.
    """
    if not runs or not all(map(lengths, runs)):
        raise ValueError("runs must be at least one, each with a stream of two tokens or more.")
    titles, marks, long = _one_each(runs, titles, marks, long)
    heights = [74 + 15 * max(3, len(run)) for run in runs]
    stop = max(times[-1] for run in runs for times in run.values() if times)
    start = min(times[0] for run in runs for times in run.values() if times)
    margin = 0.01 * (stop - start)
    layout: dict[str, Any] = {
        "height": 70 + sum(heights),
        "barmode": "overlay",
        "margin": {"l": 10, "t": 44},
        "legend": {"orientation": "h", "yref": "container", "y": 0.995, "yanchor": "top", "x": 1, "xanchor": "right"},
        "annotations": [],
    }
    traces: list[dict[str, Any]] = []
    top = 1.0
    for k, (run, title, notes) in enumerate(zip(runs, titles, marks, strict=True)):
        suffix = "" if k == 0 else str(k + 1)
        bottom = max(0.0, top - heights[k] / sum(heights))
        domain = [round(bottom + 0.02, 4), round(top - 44 / sum(heights), 4)]
        on = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        traces += [trace | on for trace in _panel(run, notes, long, unit, NARROW * (stop - start), first=k == 0)]
        last = k == len(runs) - 1
        layout[f"xaxis{suffix}"] = axis(
            unit if last else "", range=[_plain(start - margin), _plain(stop + margin)], anchor=f"y{suffix}",
            showticklabels=last, **({} if last else {"matches": f"x{len(runs)}"}),
        )  # fmt: skip
        layout[f"yaxis{suffix}"] = _rows(run, domain, f"x{suffix}")
        layout["annotations"] += _notes(title, notes, domain, f"x{suffix}", start)
        top = bottom
    return figure(traces, layout, token_gaps_text(*runs, titles=titles, marks=marks, unit=unit, long=long))


def token_gaps_text(
    *runs: TokenTimes,
    titles: Sequence[str] = (),
    marks: Sequence[Mapping[str, float]] = (),
    unit: str = "s",
    long: float | None = None,
) -> TextView:
    """Each run in a line, `10 streams, 430 gaps: median 0.07, P99 2.3, longest 2.3 s; 10 longer than 0.14`, then one
    line per mark and one per stream."""
    titles, marks, long = _one_each(runs, titles, marks, long)
    lines = []
    for run, title, notes in zip(runs, titles, marks, strict=True):
        found = lengths(run)
        marked = ", ".join(f"{name} {q:.4g}" for name, q in (
            ("median", percentile(found, 0.5)), ("P99", percentile(found, 0.99)), ("longest", max(found))))  # fmt: skip
        longer = sum(gap > long for gap in found)
        named = f"{title}: " if title else ""
        lines.append(f"{named}{len(run)} streams, {len(found)} gaps: {marked} {unit}; {longer} longer than {long:.4g}")
        lines += [f"  {at:.4g}  {what}" for what, at in notes.items()]
        width = max(len(short(name)) for name in run)
        for name, times in list(run.items())[:MAX_ROWS]:
            lines.append(f"  {short(name):{width}}  {_longest(times, unit)}")
        if len(run) > MAX_ROWS:
            lines.append(f"  … and {len(run) - MAX_ROWS} more")
    return TextView("\n".join(lines))


def lengths(run: TokenTimes) -> list[float]:
    """Gaps between consecutive tokens, pooled over all streams."""
    return [after - before for times in run.values() for before, after in pairs(times)]


def pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    """Times of consecutive tokens, as pairs."""
    return list(zip(times, times[1:], strict=False))


def _one_each(
    runs: Sequence[TokenTimes], titles: Sequence[str], marks: Sequence[Mapping[str, float]], long: float | None
) -> tuple[list[str], list[Mapping[str, float]], float]:
    """Titles and marks padded to one per run, and the threshold of a long gap."""
    missing_titles, missing_marks = len(runs) - len(titles), len(runs) - len(marks)
    long = LONG * percentile(lengths(runs[0]), 0.5) if long is None else long
    return [*titles, *[""] * missing_titles], [*marks, *[{}] * missing_marks], long


def _longest(times: Sequence[float], unit: str) -> str:
    if len(times) < 2:
        return "1 token" if times else "no token"
    before, after = max(pairs(times), key=lambda pair: pair[1] - pair[0])
    return f"{len(times)} tokens, longest gap {after - before:.4g} {unit} ({before:.4g} – {after:.4g})"


def _panel(
    run: TokenTimes, notes: Mapping[str, float], long: float, unit: str, narrow: float, first: bool
) -> list[dict[str, Any]]:
    """Traces of one panel: bars of long gaps, ticks of tokens, lines of marks."""
    bars = [
        (row, before, after)
        for row, times in enumerate(run.values())
        for before, after in pairs(times)
        if after - before > long
    ]
    _, fill, pattern = SPANS["prefill"]
    rows = len(run)
    return [
        {
            "type": "bar", "orientation": "h", "name": f"gap above {long:.3g} {unit}", "legendgroup": "long",
            "showlegend": first, "width": 0.7,
            "y": [row for row, _, _ in bars] or [None],
            "base": [_plain(before) for _, before, _ in bars] or [None],
            "x": [_plain(after - before) for _, before, after in bars] or [None],
            "text": [f"{after - before:.3g}" if after - before > narrow else "" for _, before, after in bars] or [""],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
            "insidetextfont": {"color": INK, "size": 10},
            "hovertemplate": f"%{{x:.4g}} {unit} from %{{base:.4g}} on<extra></extra>",
            "marker": {"color": fill, "line": {"color": FAINT, "width": 0.6}, "pattern": hatch(fill, pattern)},
        },
        {
            "type": "scatter", "mode": "markers", "name": "a token", "legendgroup": "token", "showlegend": first,
            "x": [_plain(time) for times in run.values() for time in times],
            "y": [row for row, times in enumerate(run.values()) for _ in times],
            "marker": {"symbol": "line-ns", "size": 8, "line": {"width": 1.6, "color": INK}},
            "hovertemplate": f"%{{x:.4g}} {unit}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "lines", "name": "what happened", "showlegend": False, "hoverinfo": "skip",
            "x": [x for at in notes.values() for x in (_plain(at), _plain(at), None)] or [None],
            "y": [y for _ in notes for y in (-0.8, rows - 0.3, None)] or [None],
            "line": {"color": INK, "width": 1.3, "dash": "dot"},
        },
    ]  # fmt: skip


def _rows(run: TokenTimes, domain: list[float], anchor: str) -> dict[str, Any]:
    every = -(-max(1, len(run)) // MAX_ROWS)
    shown = range(0, len(run), every)
    names = list(run)
    return axis(
        range=[max(len(run), 3) - 0.3, -0.8],
        domain=domain,
        anchor=anchor,
        tickvals=list(shown),
        ticktext=[safe(short(names[row], 14)) for row in shown],
        automargin=True,
        showgrid=False,
        tickfont={"size": 11, "color": INK},
    )


def _notes(title: str, notes: Mapping[str, float], domain: list[float], x: str, start: float) -> list[dict[str, Any]]:
    """Labels of the marks above their lines, and the title of the panel above them."""
    plain = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "yref": "paper", "y": domain[1]}
    written = [
        plain | {"text": safe(what), "xref": x, "x": _plain(at), "font": {"size": 11, "color": INK}}
        for what, at in notes.items()
    ]
    if title:
        named = {"text": f"<b>{safe(short(title, 60))}</b>", "xref": x, "x": start, "font": {"size": 13, "color": INK}}
        written.append(plain | named | {"yshift": 15})
    return written


def _plain(value: float) -> float:
    return int(value) if value == int(value) else round(float(value), 4)
