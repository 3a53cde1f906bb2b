"""Figure: a plotly figure with a step slider that needs no kernel, a text view, and a small size in a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import plotly.graph_objects as go

from labcore.recorder import Recording
from labcore.viz.style import EMPTY, FAINT, GRID, INK, PAPER

PLOTLY_MIME = "application/vnd.plotly.v1+json"
BUDGET = 380_000
"""Default limit on the frames of one figure, in bytes of a notebook file."""
CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
MAX_FRAMES = 60
SLIDER_HEIGHT = 72
Item = TypeVar("Item")


class TextView(str):
    """A text table whose repr is the text itself, so that a cell shows it without print."""

    def __repr__(self) -> str:
        return str(self)


NOTHING = TextView("nothing recorded yet")


class Figure(go.Figure):
    """A plotly figure with a text view, `text`.

    A notebook stores it as plotly JSON (drawn by JupyterLab without kernel or network) and as text (for viewers without
    JavaScript, exports and nbval). Without plotly.js, HTML and random ids the output takes a few kilobytes and is equal
    from run to run.
    """

    _ipython_display_ = None
    _repr_html_ = None

    @property
    def text(self) -> TextView:
        return TextView((self.layout.meta or {}).get("text", ""))

    def data_json(self) -> dict[str, Any]:
        """The figure as plain dicts and lists."""
        return json.loads(self.to_json(validate=False))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **kwargs: Any) -> dict[str, Any]:
        return {PLOTLY_MIME: self.data_json() | {"config": CONFIG}, "text/plain": self.text}


def figure(
    traces: Sequence[dict[str, Any]],
    layout: dict[str, Any],
    text: str,
    frames: Sequence[dict[str, Any]] = (),
    step: int | None = None,
) -> Figure:
    """Build a `Figure` in the common style, with a slider and a play button if there are frames.

    layout   "height" excludes the slider
    text     the text view
    frames   plotly frames named by their step; `step` is shown first
    """
    base = {
        "template": {},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "margin": {"l": 60, "r": 20, "t": 56, "b": 44},
        "hoverlabel": {"bgcolor": PAPER, "font": {"color": INK, "size": 12}, "align": "left"},
        "meta": {"text": str(text)},
    }
    if len(frames) > 1:
        base |= controls([frame["name"] for frame in frames], str(step))
        base["margin"] = base["margin"] | {"b": 44 + SLIDER_HEIGHT}
    merged = base | layout
    merged["margin"] = base["margin"] | layout.get("margin", {})
    if "sliders" in merged:
        merged["height"] += SLIDER_HEIGHT
    return Figure({"data": list(traces), "layout": merged, "frames": list(frames) if len(frames) > 1 else []})


def without_slider(figure: Figure) -> dict[str, Any]:
    """Data of a figure without its slider, for a page that has one."""
    data = figure.data_json()
    layout = data["layout"]
    if layout.pop("sliders", None):
        layout["height"] -= SLIDER_HEIGHT
        layout["margin"]["b"] -= SLIDER_HEIGHT
    layout.pop("updatemenus", None)
    return data


def controls(names: Sequence[str], active: str) -> dict[str, Any]:
    """Slider and play button for the frames."""
    still = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    moving = {"mode": "immediate", "fromcurrent": True, "frame": {"duration": 400, "redraw": True}}
    button = {"method": "animate", "label": "▶", "args": [None, moving]}
    pause = {"method": "animate", "label": "❚❚", "args": [[None], still]}
    slider = {
        "active": names.index(active) if active in names else len(names) - 1,
        "steps": [{"method": "animate", "label": name, "args": [[name], still]} for name in names],
        "currentvalue": {"prefix": "step ", "font": {"size": 13, "color": INK}, "xanchor": "left"},
        "x": 0.18,
        "len": 0.82,
        "y": 0,
        "pad": {"t": 36, "b": 4},
        "font": {"color": FAINT, "size": 10},
        "bgcolor": GRID,
        "bordercolor": FAINT,
        "activebgcolor": FAINT,
        "tickcolor": FAINT,
    }
    menu = {
        "type": "buttons",
        "direction": "left",
        "buttons": [button, pause],
        "showactive": False,
        "x": 0.0,
        "xanchor": "left",
        "y": 0,
        "yanchor": "top",
        "pad": {"t": 46, "r": 8},
        "bgcolor": EMPTY,
        "bordercolor": FAINT,
        "font": {"color": INK, "size": 12},
    }
    return {"sliders": [slider], "updatemenus": [menu]}


def heading(text: str) -> dict[str, Any]:
    """Title settings: one line above the figure, updated with the step."""
    font = {"size": 13, "color": INK}
    return {"text": text, "font": font, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top"}


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """Axis settings in the common style."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": FAINT}, "standoff": 4},
        "tickfont": {"size": 11, "color": FAINT},
        "gridcolor": GRID,
        "zeroline": False,
        "fixedrange": True,
    } | settings


def sample(steps: Sequence[Item], limit: int, keep: Item | None = None) -> list[Item]:
    """At most `limit` of the steps, evenly spaced, including the first, the last and `keep`."""
    steps = list(steps)
    if len(steps) > limit:
        places = {round(i * (len(steps) - 1) / max(1, limit - 1)) for i in range(limit)}
        wanted = steps.index(keep) if keep is not None else 0
        if wanted not in places:
            places.discard(min(places - {0, len(steps) - 1} or places, key=lambda place: (abs(place - wanted), place)))
            places.add(wanted)
        steps = [steps[place] for place in sorted(places)]
    return steps


def chosen(
    recording: Recording, step: int | None, steps: Iterable[int] | None, budget: int | None = None
) -> tuple[int, list[int]]:
    """The step to show first and the steps of the slider, sampled to what a budget can hold, if given.

    Raises ValueError if a step was not recorded.
    """
    known = recording.steps
    steps = known if steps is None else sorted(set(steps))
    step = (steps or known)[-1] if step is None else step
    steps = sorted({*steps, step})
    for wanted in (steps[0], steps[-1], step):
        if not known[0] <= wanted <= known[-1]:
            raise ValueError(f"step is {wanted}; recorded steps are {known[0]} … {known[-1]}.")
    return step, steps if budget is None else sample(steps, most_frames(budget), step)


def most_frames(budget: int) -> int:
    """Maximum number of frames for a budget: 60 for the default one."""
    return max(2, MAX_FRAMES * budget // BUDGET)


def fit(frame: Callable[[int], dict[str, Any]], steps: Sequence[int], keep: int, budget: int) -> list[dict[str, Any]]:
    """Frames of evenly spaced steps, `keep` included, that take at most `budget` bytes in a notebook."""
    frames = [frame(step) for step in sample(steps, most_frames(budget), keep)]
    while len(frames) > 2 and (size := sum(map(stored_size, frames))) > budget:
        fewer = max(2, min(len(frames) - 1, int(len(frames) * budget / size)))
        frames = sample(frames, fewer, next(f for f in frames if f["name"] == str(keep)))
    return frames


def stored_size(part: Any, depth: int = 8) -> int:
    """Bytes in a notebook file, which stores one number per indented line; depth: 8 for a frame, 6 for a figure."""
    text = json.dumps(part, indent=1)
    return len(text.encode()) + depth * text.count("\n")


def columns(table: list[list[str]]) -> list[str]:
    """Rows of cells as aligned lines of text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{piece:{width}}" for piece, width in zip(row, widths, strict=True)).rstrip() for row in table]


def held(values: Sequence[Any], growth: int = 0) -> list[Any]:
    """The values with the last one repeated, plus `growth`, so that the last step is drawn with its duration."""
    return [*values, values[-1] + growth]


def nothing_recorded() -> Figure:
    """Placeholder figure before the first step."""
    note = {"text": str(NOTHING), "showarrow": False, "font": {"size": 14, "color": FAINT}}
    hidden = axis(visible=False)
    return figure([], {"height": 160, "xaxis": hidden, "yaxis": hidden, "annotations": [note]}, NOTHING)
