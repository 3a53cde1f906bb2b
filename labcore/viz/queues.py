"""Queues: waiting, running and swapped requests; counts over time, and by name at one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from labcore.recorder import Recording, RequestState, Snapshot
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
from labcore.viz.style import FAINT, INK, SPANS, colour, hatch, letter, safe, short

MAX_POINTS = 300
MAX_CHIPS = 24
QUEUES = {"running": SPANS["decode"][1], "swapped": SPANS["swapped"][1], "waiting": SPANS["waiting"][1]}
PATTERNS = {"running": "", "swapped": ".", "waiting": "/"}


def queues(
    recording: Recording,
    step: int | None = None,
    *,
    steps: Iterable[int] | None = None,
    budget: int = BUDGET,
) -> Figure:
    """Queue lengths over time; below, the requests of each queue at one step, next one first.

    step    shown first; None means the last
    steps   to draw; None means all, at most 300
    budget  bytes of a notebook for the frames; slider steps are sampled to fit
    """
    if not recording.steps:
        return nothing_recorded()
    step, steps = chosen(recording, step, steps)
    drawn = sample(steps, MAX_POINTS, keep=step)
    lengths = [{name: len(queue) for name, queue in recording.at(s).queues.items()} for s in drawn]
    most = max(1, *(sum(length.values()) for length in lengths))
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "stackgroup": "queues", "x": held(drawn, 1),
            "y": held([length[name] for length in lengths]), "line": {"width": 0.8, "color": FAINT, "shape": "hv"},
            "fillcolor": fill, "yaxis": "y",
            "fillpattern": hatch(fill, PATTERNS[name]),
            "hovertemplate": f"step %{{x}}: %{{y}} {name}<extra></extra>",
        }
        for name, fill in QUEUES.items()
    ]  # fmt: skip
    traces += [_cursor(step, most), *_chips(recording.at(step))]
    moving = list(range(3, len(traces)))

    def frame(step: int) -> dict[str, Any]:
        snapshot = recording.at(step)
        cursor, chips, more = _cursor(step, most), *_chips(snapshot)
        data = [
            {"type": "scatter", "x": cursor["x"]},
            {"type": "bar", "marker": {"color": chips["marker"]["color"]}}
            | {key: chips[key] for key in ("x", "y", "base", "text", "hovertext")},
            {"type": "scatter"} | {key: more[key] for key in ("x", "y", "text")},
        ]
        return {"name": str(step), "traces": moving, "data": data, "layout": {"title": {"text": headline(snapshot)}}}

    layout = {
        "height": 400,
        "barmode": "overlay",
        "title": heading(headline(recording.at(step))),
        "legend": {"traceorder": "reversed", "font": {"size": 11}},
        "margin": {"l": 70},
        "xaxis": axis("step", range=[steps[0], steps[-1] + 1], anchor="y"),
        "yaxis": axis("requests", range=[0, most * 1.05], domain=[0.56, 1], nticks=6),
        "xaxis2": axis(range=[-0.6, MAX_CHIPS + 1.4], anchor="y2", showgrid=False, showticklabels=False),
        "yaxis2": axis(
            range=[-3, 0], domain=[0, 0.38], anchor="x2", showgrid=False,
            tickvals=[-0.5, -1.5, -2.5], ticktext=list(QUEUES), tickfont={"size": 11, "color": INK},
        ),
    }  # fmt: skip
    return figure(traces, layout, queues_text(recording, step), fit(frame, drawn, step, budget), step)


def headline(snapshot: Snapshot) -> str:
    """`step 12   3 running, 0 swapped, 2 waiting`."""
    said = ", ".join(f"{len(snapshot.queues[name])} {name}" for name in QUEUES)
    return f"step {snapshot.step}   {said}"


def queues_text(recording: Recording, step: int | None = None) -> TextView:
    """Requests of each queue after one step (None: the last), next one first, with their progress."""
    if not recording.steps:
        return NOTHING
    snapshot = recording.at(recording.steps[-1] if step is None else step)
    table = []
    for name in QUEUES:
        for request_id in snapshot.queues[name][:MAX_CHIPS]:
            request = snapshot.requests[request_id]
            table.append(
                [
                    name,
                    letter(request.number),
                    short(request_id),
                    f"{request.num_computed_tokens}/{len(request.token_ids)} computed",
                    f"{len(request.token_ids) - request.num_prompt_tokens} generated",
                    f"preempted {request.num_preemptions}×" if request.num_preemptions else "",
                ]
            )
        more = len(snapshot.queues[name]) - MAX_CHIPS
        if more > 0:
            table.append([name, "…", f"and {more} more", "", "", ""])
    return TextView("\n".join([headline(snapshot), *columns(table)]))


def _cursor(step: int, most: int) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": [step + 0.5] * 2, "y": [0, most * 1.05], "yaxis": "y",
        "line": {"color": INK, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _chips(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any]]:
    """One lettered chip per request; a row that overflows ends with a count."""
    places, more = [], []
    for row, name in enumerate(QUEUES):
        queue = snapshot.queues[name]
        places += [(column, row, snapshot.requests[request_id]) for column, request_id in enumerate(queue[:MAX_CHIPS])]
        if len(queue) > MAX_CHIPS:
            more.append((row, f"+{len(queue) - MAX_CHIPS}"))
    chips = {
        "type": "bar", "width": 0.9, "xaxis": "x2", "yaxis": "y2", "showlegend": False,
        "x": [column for column, _, _ in places] or [None],
        "base": [round(-row - 0.85, 2) for _, row, _ in places] or [None],
        "y": [0.7] * len(places) or [None],
        "text": [letter(request.number) for _, _, request in places] or [""],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
        "insidetextfont": {"color": INK, "size": 10},
        "hovertext": [_hover(request) for _, _, request in places] or [""],
        "hoverinfo": "text",
        "marker": {
            "color": [colour(request.number) for _, _, request in places] or ["#fff"],
            "line": {"color": FAINT, "width": 0.7},
        },
    }  # fmt: skip
    counts = {
        "type": "scatter", "mode": "text", "xaxis": "x2", "yaxis": "y2", "showlegend": False, "hoverinfo": "skip",
        "x": [MAX_CHIPS - 0.3] * len(more) or [None], "y": [-row - 0.5 for row, _ in more] or [None],
        "text": [text for _, text in more] or [""], "textposition": "middle right",
        "textfont": {"size": 11, "color": INK},
    }  # fmt: skip
    return chips, counts


def _hover(request: RequestState) -> str:
    name = f"<b>{letter(request.number)}</b> {safe(short(request.request_id, 40))}"
    progress = f"{request.num_computed_tokens} of {len(request.token_ids)} tokens computed"
    return f"{name}<br>{request.state}, priority {request.priority}<br>{progress}"
