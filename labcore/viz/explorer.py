"""The explorer: a live panel around the figures. Buttons call an `EngineControl`; each figure has its text view.

    prompt ▁▁▁▁▁▁▁▁▁▁▁▁  max tokens  priority  n   [submit]
    [step] [run] [pause]   request ▾ [fork] [abort]   blocks ▁ [take away] [give back]
    step ──────────●──   (block map) (tables) (timeline) (memory) (queues)
    ▢▣▣▢ …                                                             the figure
    step 12   24 blocks: …                                              its text view, and the generated texts
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from typing import Any
from weakref import WeakSet

import ipywidgets as widgets

from labcore.recorder import Recording
from labcore.viz.block_map import block_map
from labcore.viz.block_tables import block_tables
from labcore.viz.engine_control import EngineControl
from labcore.viz.figure import CONFIG, PLOTLY_MIME, Figure, TextView, nothing_recorded, without_slider
from labcore.viz.memory import memory
from labcore.viz.queues import queues
from labcore.viz.text_view import text_view
from labcore.viz.timeline import timeline

VIEWS: dict[str, tuple[str, Callable[..., Figure]]] = {
    "block map": ("block_map", block_map),
    "tables": ("block_tables", block_tables),
    "timeline": ("timeline", timeline),
    "memory": ("memory", memory),
    "queues": ("queues", queues),
}
OF_ONE_STEP = ("block map", "tables")  # the other views show the whole run
MAX_TEXTS = 20
STORED_BYTES = 60_000
"""Bytes for the frames of the figure that a saved notebook keeps of the panel."""


def explore(what: Any, view: str = "block map") -> Explorer:
    """A live panel for an `LLM` with record=True, or a viewer for a flight record; the last expression of a cell.

    view   figure shown first, one of VIEWS; a saved notebook keeps it, with a slider
    One panel per engine and cell: running the cell again closes the panel that it made before, on any engine.
    An open panel keeps its engine alive; `shut_down()` releases it.
    Raises ValueError for an llm without a flight record, and for an unknown view.
    """
    if view not in VIEWS:
        raise ValueError(f"view is {view!r}; it must be one of {', '.join(map(repr, VIEWS))}.")
    control = None if isinstance(what, Recording) else EngineControl(what)
    recording = what if control is None else control.recorder
    cell, execution = running_cell()
    for earlier in list(_open_panels):
        same_cell = cell is not None and earlier.cell == cell and earlier.execution != execution
        if same_cell or earlier.recording is recording:
            earlier.shut_down()
    panel = Explorer(recording, control, view)
    panel.cell, panel.execution = cell, execution
    _open_panels.add(panel)
    return panel


_open_panels: WeakSet[Explorer] = WeakSet()


def running_cell() -> tuple[str | None, str | None]:
    """Id and execution of the notebook cell that runs this; None where the front end doesn't say."""
    shell = getattr(builtins, "get_ipython", lambda: None)()  # IPython defines it while a cell runs
    parent = (shell.get_parent() if hasattr(shell, "get_parent") else None) or {}
    return parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")


class Explorer(widgets.VBox):
    """See `explore`. Each click calls one method of `control`, then redraws everything from the record.

    cell, execution   the notebook cell and its execution that made the panel; see `running_cell`
    """

    cell: str | None = None
    execution: str | None = None

    def __init__(self, recording: Recording, control: EngineControl | None, view: str) -> None:
        self.recording = recording
        self.control = control
        self._runner: asyncio.Task | None = None
        self.message = widgets.HTML()
        self.step_slider = widgets.IntSlider(description="step", min=0, max=0, layout=_wide(), continuous_update=False)
        self.view = widgets.ToggleButtons(options=list(VIEWS), value=view, style={"button_width": "auto"})
        self.figure = widgets.Output(layout=widgets.Layout(min_height="320px", width="100%"))
        self.words = widgets.HTML()
        widgets_above = [] if control is None else self._control_rows()
        super().__init__([*widgets_above, self.message, self.step_slider, self.view, self.figure, self.words])
        self.step_slider.observe(lambda _: self.draw(), "value")
        self.view.observe(lambda _: self.draw(), "value")
        self.refresh()

    def act(self, action: Callable[[], Any], done: str = "") -> bool:
        """Run an action; return whether it succeeded. An error message stays until the next success."""
        try:
            action()
        except Exception as error:  # an engine with user-written parts may raise anything; the panel must survive
            self._say(str(error) or type(error).__name__, wrong=True)
            worked = False
        else:
            self._say(done)
            worked = True
        self.refresh()
        return worked

    def refresh(self) -> None:
        """Update slider, request list, figure and text from the record."""
        steps = self.recording.steps
        followed = self.step_slider.value == self.step_slider.max
        with self.step_slider.hold_trait_notifications():
            if steps:
                self.step_slider.max = max(self.step_slider.max, steps[-1])
                self.step_slider.min = steps[0]
                self.step_slider.value = steps[-1] if followed else self.step_slider.value
        if self.control is not None:
            self._offer(list(self.recording.at().requests))
        self.draw()

    def draw(self) -> None:
        """Draw the selected figure and text view at the selected step, replacing the previous ones."""
        step = self.step_slider.value if self.recording.steps else None
        steps = {"steps": [step]} if self.view.value in OF_ONE_STEP else {}
        figure = self._figure(step=step, budget=0, **steps)
        self.figure.outputs = ({"output_type": "display_data", "data": still(figure), "metadata": {}},)
        words = escape(text_view(self.recording, step, VIEWS[self.view.value][0]) + self._texts(), quote=False)
        self.words.value = f"<pre style='white-space:pre-wrap;word-break:normal;line-height:1.35'>{words}</pre>"

    async def run(self) -> None:
        """Step until no request is unfinished, yielding to other clicks after each step."""
        while self.control.is_busy and self.act(self.control.step):
            await asyncio.sleep(0.01)

    def pause(self) -> None:
        """Stop after the current step."""
        if self._runner is not None:
            self._runner.cancel()
            self._runner = None

    def shut_down(self) -> None:
        """Stop, return blocks taken out of the pool, close the widgets, and release engine and record."""
        self.pause()
        control, self.control = self.control, None
        self.recording = Recording(1, 1)  # a notebook keeps the panel, as the output of its cell
        _open_panels.discard(self)
        self.close_all()
        if control is not None and control.num_taken:
            control.shrink(-control.num_taken)

    def close_all(self) -> None:
        for widget in list(whole(self)):
            widget.close()

    def _offer(self, names: list[str]) -> None:
        """Offer requests to fork or abort; the selected one stays selected while it is there."""
        if list(self.target.options) != names:
            chosen = self.target.value
            self.target.options = names
            self.target.value = chosen if chosen in names else (names[0] if names else None)

    def _figure(self, **options: Any) -> Figure:
        """The selected figure, or a placeholder before the first step."""
        _, make = VIEWS[self.view.value]
        return make(self.recording, **options) if self.recording.steps else nothing_recorded()

    def _control_rows(self) -> list[widgets.Widget]:
        self.prompt = widgets.Text("The sea at night", description="prompt", layout=_wide())
        self.max_tokens = _number(widgets.BoundedIntText, 16, "max tokens", min=1, max=100_000)
        self.priority = _number(widgets.IntText, 0, "priority")
        self.n = _number(widgets.BoundedIntText, 1, "n", min=1, max=16)
        self.target = widgets.Dropdown(description="request", layout=_narrow("220px"))
        self.amount = _number(widgets.BoundedIntText, 4, "blocks", min=1, max=1_000_000)
        return [
            _row([self.prompt, self.max_tokens, self.priority, self.n, self._button("submit", self._submit)]),
            _row(
                [
                    self._button("step", self._step),
                    self._button("run", self._start),
                    self._button("pause", self.pause),
                    self.target,
                    self._button("fork", self._fork),
                    self._button("abort", lambda: self.act(partial(self.control.abort, self._target()))),
                    self.amount,
                    self._button("take away", lambda: self.act(partial(self.control.shrink, self.amount.value))),
                    self._button("give back", lambda: self.act(partial(self.control.shrink, -self.amount.value))),
                ]
            ),
        ]

    def _button(self, text: str, click: Callable[[], Any]) -> widgets.Button:
        button = widgets.Button(description=text, layout=_narrow("auto"))
        button.on_click(lambda _: click())
        return button

    def _submit(self) -> None:
        asked = (self.prompt.value, self.max_tokens.value, self.priority.value, self.n.value)
        self.act(partial(self.control.submit, *asked), done="queued; it is admitted as soon as it fits")

    def _fork(self) -> None:
        fork = partial(self.control.fork, self._target())
        self.act(fork, done="forked; both own the same blocks until one of them writes")

    def _step(self) -> None:
        if self.control.is_busy:
            self.act(self.control.step)
        else:
            self._say("nothing to do — submit a prompt first")

    def _start(self) -> None:
        self.pause()
        self._runner = asyncio.get_running_loop().create_task(self.run())

    def _target(self) -> str:
        return self.target.value or ""

    def _say(self, text: str, wrong: bool = False) -> None:
        style = "display:inline-block;padding:1px 8px;background:#a00;color:#fff" if wrong else "color:inherit"
        self.message.value = f"<div role='status' style='{style}'>{escape(text)}</div>" if text else ""

    def _texts(self) -> str:
        texts = {} if self.control is None else self.control.texts
        lines = [f"{name}  {text!r}" for name, text in list(texts.items())[-MAX_TEXTS:]]
        return "\n\n" + "\n".join(lines) if lines else ""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """Without a kernel: the figure first shown, with a slider, and its text view."""
        figure = self._figure(budget=STORED_BYTES)
        words = TextView(f"explorer (run the cell for the live panel)\n{figure.text}")
        return super()._repr_mimebundle_(**kwargs) | figure._repr_mimebundle_() | {"text/plain": words}


def whole(widget: widgets.Widget) -> Iterator[widgets.Widget]:
    """A widget and all that ipywidgets keeps for it: its children, layouts and styles, each by itself."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, widgets.Widget):
            yield from whole(part)
    yield widget


def still(figure: Figure) -> dict[str, Any]:
    """Display data of a figure without slider and frames; the panel has its own slider."""
    data = without_slider(figure) | {"frames": [], "config": CONFIG}
    return {PLOTLY_MIME: data, "text/plain": str(figure.text)}


def _number(kind: type[widgets.Widget], value: int, name: str, **limits: int) -> widgets.Widget:
    return kind(value, description=name, layout=_narrow("150px"), **limits)


def _row(controls: list[widgets.Widget]) -> widgets.HBox:
    return widgets.HBox(controls, layout=widgets.Layout(flex_flow="row wrap"))


def _narrow(width: str) -> widgets.Layout:
    return widgets.Layout(width=width)


def _wide() -> widgets.Layout:
    return widgets.Layout(flex="1 1 auto", width="auto", min_width="200px")
