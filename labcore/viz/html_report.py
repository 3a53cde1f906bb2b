"""HTML report: one page with all figures of a flight record, linked by one slider, without network or kernel.

A content security policy blocks network access, and names are embedded as data, never as markup.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from labcore.files.output_file import output_file
from labcore.recorder import Event, Recording
from labcore.viz.block_map import block_map, block_map_text
from labcore.viz.block_tables import block_tables
from labcore.viz.figure import BUDGET, Figure, without_slider
from labcore.viz.memory import memory
from labcore.viz.queues import queues
from labcore.viz.style import short
from labcore.viz.timeline import timeline

PAGE_BUDGET = 10 * BUDGET
MAX_WORDED = 300
SECTIONS: dict[str, tuple[str, str, Callable[..., Figure]]] = {
    "block_map": ("The pool", "A cell is a KV block: its letter names the owner, its fill what it holds.", block_map),
    "block_tables": ("Block tables", "Logical blocks above; arrows lead to the physical ones.", block_tables),
    "timeline": ("Timeline", "State of each request over time. Click to go to a step.", timeline),
    "memory": ("Memory", "What the slots of the pool hold, against contiguous reservations.", memory),
    "queues": ("Queues", "Waiting, running and swapped requests.", queues),
}
SIGNATURE = '<meta name="generator" content="labcore">'
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="labcore">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<div class="controls">
<button id="back" aria-label="one step back">←</button>
<button id="play" aria-label="play">▶</button>
<button id="on" aria-label="one step on">→</button>
<input id="step" type="range" min="0" max="{last}" value="{last}" aria-label="step">
<output id="at"></output>
</div>
</header>
<main>
{sections}
<div class="columns">
<section><h2>In words</h2><pre id="words" tabindex="0"></pre></section>
<section><h2>Events of this step</h2><pre id="events" tabindex="0"></pre></section>
</div>
</main>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{js}</script>
</body>
</html>
"""


def write_html_report(recording: Recording, path: str | Path, title: str = "labcore flight record") -> None:
    """Write the report (about 5 MB, mostly plotly.js), replacing an older one.

    Raises ValueError if no step was recorded, or if `path` is a file other than a report.
    """
    text = html_report(recording, title)
    with output_file(path, lambda start: SIGNATURE in start, "a page that labcore made") as file:
        file.write(text)


def html_report(recording: Recording, title: str = "labcore flight record") -> str:
    """The report as one string. Raises ValueError if no step was recorded."""
    if not recording.steps:
        raise ValueError("this flight record has no step yet — run the engine, then save it.")
    sections, figures = [], []
    for name, (heading, caption, draw) in SECTIONS.items():
        sections.append(f'<h2>{heading}</h2><p>{caption}</p><div class="picture" id="{name}"></div>')
        figures.append({"id": name, "figure": without_slider(draw(recording, budget=PAGE_BUDGET))})
    worded = [int(frame["name"]) for frame in figures[0]["figure"]["frames"]][:MAX_WORDED] or recording.steps
    data = {
        "steps": recording.steps,
        "pictures": figures,
        "worded": worded,
        "words": {step: str(block_map_text(recording, step)) for step in worded},
        "events": events_by_step(recording),
    }
    return PAGE.format(
        title=escape(title),
        css=_part("html_report.css"),
        last=len(recording.steps) - 1,
        sections="\n".join(sections),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        js=_part("html_report.js"),
    )


def events_by_step(recording: Recording) -> dict[int, list[str]]:
    """Step → its events, one line each: `allocate  ana  [3, 4]`."""
    lines: dict[int, list[str]] = defaultdict(list)
    for event in recording.events():
        lines[event.step].append(event_line(recording, event))
    return lines


def event_line(recording: Recording, event: Event) -> str:
    """One event as a line of text."""
    detail = dict(event.detail)
    if event.kind == "arrive":
        detail = {"prompt": detail["prompt"], "priority": detail["priority"], "max_tokens": detail["max_tokens"]}
    elif event.kind == "token":
        detail["text"] = recording.text([detail["token"]])
    blocks = str(list(event.blocks)) if event.blocks else ""
    said = [f"{key} {value!r}" for key, value in detail.items() if value is not None]
    return "  ".join(piece for piece in (f"{event.kind:13}", short(event.request or "", 24), blocks, *said) if piece)


def _part(name: str) -> str:
    return files("labcore.viz").joinpath(name).read_text(encoding="utf-8")
