"""Timeline: the state of each request over steps; several runs side by side on one scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any

from labcore.recorder import SPAN_STATES, Recording, Span
from labcore.viz.figure import BUDGET, Figure, TextView, axis, figure, fit, most_frames, sample
from labcore.viz.style import FAINT, INK, SPANS, hatch, safe, short

RecordingOrSpans = Recording | Sequence[Span]
MAX_TICKS = 40
MOST_STEPS_NAMED = 12


def timeline(
    *runs: RecordingOrSpans, titles: Sequence[str] = (), step: int | None = None, budget: int = BUDGET
) -> Figure:
    """Requests over steps, one row each, as coloured, hatched and lettered bars; one panel per run.

    runs     flight records or lists of `Span`
    titles   one per run
    step     first position of the cursor; None means the last step
    budget   bytes of a notebook for the frames; slider steps are sampled to fit
    """
    spans = [spans_of(run) for run in runs]
    titles = [*titles, *[""] * (len(runs) - len(titles))]
    stop = max((span.stop for run in spans for span in run), default=1)
    start = min((span.start for run in spans for span in run), default=0)
    names = [_rows(run) for run in spans]
    tallest = max(map(len, names), default=1)
    steps = list(range(int(start), max(int(start) + 1, ceil(stop))))
    step = steps[-1] if step is None else step
    text = timeline_text(*runs, titles=titles)

    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": min(860, 118 + 22 * max(3, tallest)),
        "barmode": "overlay",
        "bargap": 0.25,
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "legend": {
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 1,
            "xanchor": "right",
            "traceorder": "normal",
        },
        "annotations": [],
        "margin": {"l": 10, "t": 74 if any(titles) else 48},
    }
    cut = 18 if len(runs) < 2 else 12
    longest = max((len(short(name, cut)) for rows in names for name in rows), default=0)
    few = float(stop - start).is_integer() and stop - start <= MOST_STEPS_NAMED
    ticks = {"dtick": 1} if few else {"nticks": MOST_STEPS_NAMED}  # whole steps only
    gap = 0.03 + 0.009 * longest  # room for the names of every run but the first
    width = (1 - gap * (len(runs) - 1)) / max(1, len(runs))  # equal, or one scale would look like two
    for k, (run, rows) in enumerate(zip(spans, names, strict=True)):
        suffix = "" if k == 0 else str(k + 1)
        traces += _bars(run, rows, suffix, {span.state for other in spans for span in other}, first=k == 0)
        domain = [k * (width + gap), k * (width + gap) + width]
        layout[f"xaxis{suffix}"] = axis(
            "step", domain=domain, range=[start, stop], anchor=f"y{suffix}", ticks="outside", ticklen=3, **ticks
        )
        layout[f"yaxis{suffix}"] = _row_axis(rows, tallest, f"x{suffix}", cut)
        if titles[k]:
            layout["annotations"].append(_title(titles[k], domain[0]))
    cursors = [len(traces) + k for k in range(len(runs))]
    traces += [_cursor(run, step, tallest, k) for k, run in enumerate(spans)]

    def frame(step: int) -> dict[str, Any]:
        moved = [_cursor(run, step, tallest, k) for k, run in enumerate(spans)]
        moved = [{key: cursor[key] for key in ("type", "x", "hovertext")} for cursor in moved]
        return {"name": str(step), "traces": cursors, "data": moved}

    frames = fit(frame, sample(steps, most_frames(budget), step), step, budget)
    return figure(traces, layout, text, frames, step)


def spans_of(run: RecordingOrSpans) -> list[Span]:
    """The spans of a flight record, or the given spans."""
    return run.spans() if isinstance(run, Recording) else list(run)


def timeline_text(*runs: RecordingOrSpans, titles: Sequence[str] = ()) -> TextView:
    """The states of each request in one line: `ana   waiting 0–2  prefill 2–3  decode 3–9`."""
    lines = []
    for k, run in enumerate(runs):
        spans = spans_of(run)
        rows = _rows(spans)
        time = Counter()
        for span in spans:
            time[span.state] += span.stop - span.start
        stop = max((span.stop for span in spans), default=0)
        title = titles[k] + ": " if k < len(titles) and titles[k] else ""
        totals = ", ".join(f"{state} {_number(time[state])}" for state in SPAN_STATES if time[state])
        lines.append(f"{title}{len(rows)} requests, ends at {_number(stop)}; request-steps: {totals or 'none'}")
        width = max((len(short(name)) for name in rows), default=0)
        for name in rows[:MAX_TICKS]:
            way = "  ".join(f"{s.state} {_number(s.start)}–{_number(s.stop)}" for s in spans if s.request_id == name)
            lines.append(f"  {short(name):{width}}  {way}")
        if len(rows) > MAX_TICKS:
            lines.append(f"  … and {len(rows) - MAX_TICKS} more")
    return TextView("\n".join(lines))


def _rows(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.request_id for span in spans))


def _bars(spans: Sequence[Span], rows: list[str], suffix: str, used: set[str], first: bool) -> list[dict[str, Any]]:
    place = {name: row for row, name in enumerate(rows)}
    traces = []
    for state in SPAN_STATES:
        if state not in used:
            continue
        mark, fill, pattern = SPANS[state]
        mine = [span for span in spans if span.state == state]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": f"{mark} {state}",
                "legendgroup": state,
                "showlegend": first,
                "x": [_plain(span.stop - span.start) for span in mine] or [None],
                "base": [_plain(span.start) for span in mine] or [None],
                "y": [place[span.request_id] for span in mine] or [None],
                "text": mark,
                "textposition": "inside",
                "insidetextanchor": "middle",
                "width": 0.75,  # otherwise states with few rows get wider bars
                "textangle": 0,
                "insidetextfont": {"color": INK, "size": 9},
                "hovertext": [
                    f"{safe(short(s.request_id, 60))}<br>{state} {_number(s.start)}–{_number(s.stop)}" for s in mine
                ],
                "hoverinfo": "text",
                "marker": {
                    "color": fill,
                    "line": {"color": FAINT, "width": 0.6},
                    "pattern": hatch(fill, pattern),
                },
                "xaxis": f"x{suffix}",
                "yaxis": f"y{suffix}",
            }
        )
    return traces


def _row_axis(rows: list[str], tallest: int, anchor: str, cut: int) -> dict[str, Any]:
    every = -(-max(1, len(rows)) // MAX_TICKS)
    shown = range(0, len(rows), every)
    return axis(
        range=[max(tallest, 3) - 0.4, -0.6],
        tickvals=list(shown),
        ticktext=[safe(short(rows[i], cut)) for i in shown],
        automargin=True,
        showgrid=False,
        anchor=anchor,
        ticks="outside",
        ticklen=4,
        tickcolor="rgba(0,0,0,0)",
        tickfont={"size": 11, "color": INK},
    )


def _cursor(spans: Sequence[Span], step: int, tallest: int, k: int) -> dict[str, Any]:
    suffix = "" if k == 0 else str(k + 1)
    busy = Counter(span.state for span in spans if span.start <= step < span.stop)
    said = ", ".join(f"{busy[state]} {state}" for state in SPAN_STATES if busy[state]) or "none"
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [step + 0.5] * 2,
        "y": [-0.6, max(tallest, 3) - 0.4],
        "line": {"color": INK, "width": 1.5, "dash": "dot"},
        "hovertext": f"step {step}: {said}",
        "hoverinfo": "text",
        "showlegend": False,
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
    }


def _title(text: str, x: float) -> dict[str, Any]:
    return {
        "text": f"<b>{safe(short(text, 60))}</b>",
        "xref": "paper", "yref": "paper", "x": x, "y": 1, "xanchor": "left", "yanchor": "bottom",
        "showarrow": False, "font": {"size": 13, "color": INK}, "yshift": 30,
    }  # fmt: skip


def _plain(value: float) -> float:
    return int(value) if value == int(value) else round(float(value), 4)


def _number(value: float) -> str:
    return f"{_plain(value):,}" if value == int(value) else f"{value:.3g}"
