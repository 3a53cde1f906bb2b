"""The explorer's buttons do what they say, its panel follows, and what goes wrong is said until it is mended."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from types import SimpleNamespace

import ipywidgets as widgets
import pytest
from tiny_models import prompt, tiny
from toy_engine import ToyEngine

from labcore import LLM, SamplingParams
from labcore.models import from_model
from labcore.viz import block_map, explore, text_view
from labcore.viz.engine_control import EngineControl
from labcore.viz.explorer import VIEWS, Explorer
from labcore.viz.figure import PLOTLY_MIME


class Characters:
    """A tokenizer of sorts: a character a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 256 for character in text]


def llm(**settings) -> LLM:
    made = LLM(
        from_model(tiny("llama")), **{"num_blocks": 16, "block_size": 4, "max_model_len": 48, "record": True} | settings
    )
    made.tokenizer = Characters()
    return made


def buttons(panel: widgets.Widget) -> dict[str, widgets.Button]:
    found = {panel.description: panel} if isinstance(panel, widgets.Button) else {}
    for child in getattr(panel, "children", ()):
        found |= buttons(child)
    return found


def words(panel: Explorer) -> str:
    return panel.words.value


def drawn(panel: Explorer) -> dict:
    (output,) = panel.figure.outputs
    return output["data"][PLOTLY_MIME]


def test_explorer_shows_submit_step_fork_and_abort():
    panel = explore(llm())
    press = buttons(panel)
    assert "nothing recorded yet" in words(panel)
    panel.prompt.value = "abcdef"
    press["submit"].click()
    assert panel.target.options == ("r1",) and "queued" in panel.message.value
    press["step"].click()
    assert "step 1   16 blocks: 2 owned" in words(panel) and panel.message.value == ""
    press["step"].click()
    press["fork"].click()
    assert panel.target.options == ("r1", "r1-fork2") and "both own the same blocks" in panel.message.value
    press["step"].click()
    assert "r1(0) r1-fork2(0)  refcount 2" in words(panel) and panel.message.value == ""
    assert drawn(panel)["data"][0]["text"][0] == "AB"
    press["abort"].click()
    assert panel.target.options == ("r1-fork2",)
    press["step"].click()
    assert "r1(0)" not in words(panel)
    panel.control.engine.check_integrity()


def test_fork_begins_with_every_block_and_token_of_its_parent():
    made = llm()
    control = EngineControl(made)
    control.submit("abcdef")
    control.step()
    control.step()
    free = made.engine.pool.num_free
    child = control.fork("r1")
    told = control.recorder.at()
    assert made.engine.pool.num_free == free
    assert told.tables["r1"] == told.tables[child] and [told.blocks[b].refcount for b in told.tables[child]] == [2, 2]
    assert told.requests[child].token_ids == told.requests["r1"].token_ids
    control.step()
    (copy,) = [event for event in control.recorder.events() if event.kind == "copy_on_write"]
    assert copy.step == 3 and copy.request == "r1"
    while control.step():
        made.engine.check_integrity()
    said = {"r1": [], child: []}
    for event in control.recorder.events():
        if event.kind == "token":
            said[event.request].append(event.detail["token"])
    assert len(said["r1"]) == 16 and len(said[child]) == 14 and said["r1"][2:] != said[child]


def test_explorer_draws_the_notebooks_figure_without_its_slider():
    panel = explore(llm())
    buttons(panel)["submit"].click()
    buttons(panel)["step"].click()
    shown, own = drawn(panel), block_map(panel.recording, 1).data_json()
    assert shown["data"] == own["data"] and shown["frames"] == []
    assert "sliders" not in shown["layout"] and "updatemenus" not in shown["layout"]


def test_explorer_views_draw_and_have_the_same_text():
    panel = explore(llm())
    buttons(panel)["submit"].click()
    for _ in range(3):
        buttons(panel)["step"].click()
    for view, (name, _) in VIEWS.items():
        panel.view.value = view
        assert text_view(panel.recording, 3, name).splitlines()[0] in words(panel)
        assert drawn(panel)["data"]


def test_explorer_clicks_leave_one_figure_and_no_stale_text():
    panel = explore(llm())
    for _ in range(3):
        buttons(panel)["submit"].click()
    for _ in range(50):
        buttons(panel)["step"].click()
    last = panel.recording.steps[-1]
    assert panel.step_slider.value == panel.step_slider.max == last < 50
    assert len(panel.figure.outputs) == 1
    assert words(panel).count("step ") == 1 and f"step {last} " in words(panel)
    assert "nothing to do" in panel.message.value


def test_explorer_errors_are_shown_until_the_next_success():
    panel = explore(llm())
    press = buttons(panel)
    panel.prompt.value = ""
    press["submit"].click()
    assert "the prompt is empty" in panel.message.value
    panel.prompt.value = "x" * 60
    press["submit"].click()
    assert "max_model_len" in panel.message.value and "Traceback" not in panel.message.value
    panel.prompt.value = "abc"
    press["submit"].click()
    assert "queued" in panel.message.value
    panel.amount.value = 100
    press["take away"].click()
    assert "100 blocks asked for, 16 are free" in panel.message.value
    press["give back"].click()
    assert "no blocks were taken" in panel.message.value
    press["step"].click()
    assert panel.message.value == ""
    press["abort"].click()
    press["abort"].click()
    assert "is not being served" in panel.message.value


def test_explorer_shrunk_pool_stops_the_run_until_blocks_return():
    made = llm()
    panel = explore(made)
    press = buttons(panel)
    panel.amount.value = 15
    press["take away"].click()
    press["submit"].click()
    press["step"].click()
    assert "no request fits into the remaining blocks" in panel.message.value
    assert "15 taken by no request" in words(panel)
    press["give back"].click()
    press["step"].click()
    assert panel.message.value == "" and "4 owned" in words(panel)
    made.engine.check_integrity()


def test_explorer_run_goes_to_the_end_and_pause_stops_it():
    async def scene() -> None:
        panel = explore(llm())
        press = buttons(panel)
        press["submit"].click()
        press["run"].click()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        press["pause"].click()
        stopped = len(panel.recording.steps)
        assert stopped >= 1 and panel.control.is_busy
        await asyncio.sleep(0.05)
        assert len(panel.recording.steps) == stopped
        await panel.run()
        assert not panel.control.is_busy and len(panel.recording.steps) == 16

    asyncio.run(scene())


def test_explorer_slider_stays_on_an_earlier_step():
    panel = explore(llm())
    press = buttons(panel)
    press["submit"].click()
    for _ in range(4):
        press["step"].click()
    panel.step_slider.value = 2
    assert "step 2 " in words(panel)
    press["step"].click()
    assert panel.step_slider.value == 2 and panel.step_slider.max == 5


def test_explorer_cell_run_again_leaves_one_panel():
    made = llm()
    first = explore(made)
    buttons(first)["submit"].click()
    buttons(first)["take away"].click()
    second = explore(made)
    assert first.comm is None, "the first panel has left the page"
    assert second.comm is not None and second.control.num_taken == 0
    assert made.engine.pool.num_free == 16, "and has given back what it had taken"
    assert explore(llm()).comm is not None and second.comm is not None, "another engine has a panel of its own"


def run_cell(monkeypatch, cell: str, execution: str) -> None:
    """From here on code runs as if a notebook's front end had asked for this cell."""
    parent = {"header": {"msg_id": execution}, "metadata": {"cellId": cell}}
    monkeypatch.setattr("builtins.get_ipython", lambda: SimpleNamespace(get_parent=lambda: parent), raising=False)


def open_widgets() -> int:
    return len(sys.modules["ipywidgets.widgets.widget"]._instances)


def test_widgets_of_a_closed_panel_hold_no_engine_no_pool_and_no_record():
    """Even where the notebook keeps the panel itself, as the output of its cell."""
    gc.collect()
    before, made = open_widgets(), llm()
    gone = [weakref.ref(part) for part in (made, made.engine, made.engine.pool, made.engine.recorder)]
    panel = explore(made)
    press = buttons(panel)
    press["submit"].click()
    press["step"].click()
    panel.shut_down()
    del made
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    assert open_widgets() == before, "layouts and styles are widgets, too"
    panel.shut_down()


def test_widgets_of_a_viewer_are_all_closed():
    gc.collect()
    before = open_widgets()
    recording = ToyEngine().recorder
    gone = weakref.ref(recording)
    panel = explore(recording)
    panel.shut_down()
    del recording
    gc.collect()
    assert open_widgets() == before and gone() is None


def test_widgets_that_a_broken_pool_cannot_take_blocks_back_from_are_closed_all_the_same():
    made = llm()
    panel = explore(made)
    buttons(panel)["take away"].click()
    made.engine.pool.free = lambda blocks: 1 / 0
    with pytest.raises(ZeroDivisionError):
        explore(made)
    assert panel.comm is None and explore(made).comm is not None


def test_widgets_of_a_cell_that_makes_a_new_engine_free_the_one_before(monkeypatch):
    run_cell(monkeypatch, "cell-a", "first run")
    engine = weakref.ref((made := llm()).engine)
    first = explore(made)
    run_cell(monkeypatch, "cell-b", "second run")
    elsewhere = explore(llm())
    run_cell(monkeypatch, "cell-a", "third run")
    made = llm()
    one, two = explore(made), explore(llm())
    gc.collect()
    assert first.comm is None and engine() is None
    assert elsewhere.comm is not None, "another cell keeps its panel"
    assert one.comm is not None and two.comm is not None, "and so do two panels of one run"
    one.shut_down()
    two.shut_down()
    elsewhere.shut_down()


def test_explorer_without_a_kernel_is_text_and_a_figure_that_steps():
    panel = explore(llm())
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == "explorer (run the cell for the live panel)\nnothing recorded yet"
    buttons(panel)["submit"].click()
    for _ in range(3):
        buttons(panel)["step"].click()
    bundle = panel._repr_mimebundle_()
    assert bundle[PLOTLY_MIME]["data"] == drawn(panel)["data"], "and a picture, of the state that it was made in"
    assert [frame["name"] for frame in bundle[PLOTLY_MIME]["frames"]] == ["1", "2", "3"]


@pytest.mark.parametrize("view", VIEWS)
def test_explorer_opens_with_and_stores_the_given_view(view):
    name, make = VIEWS[view]
    made = llm()
    assert explore(made, view)._repr_mimebundle_()["text/plain"].endswith("nothing recorded yet")
    made.generate([prompt(6), prompt(9)], SamplingParams(temperature=0, max_tokens=4))
    panel = explore(made, view)
    assert panel.view.value == view and text_view(made.engine.recorder, 4, name).splitlines()[0] in words(panel)
    bundle = panel._repr_mimebundle_()
    assert bundle[PLOTLY_MIME]["data"] == make(made.engine.recorder).data_json()["data"]
    assert bundle["text/plain"].splitlines()[1] == text_view(made.engine.recorder, figure=name).splitlines()[0]


def test_explorer_refuses_an_unknown_view():
    with pytest.raises(ValueError, match="view is 'map'; it must be one of 'block map', 'tables', 'timeline'"):
        explore(llm(), "map")


def test_submit_and_fork_in_a_second_panel_find_names_that_are_free():
    made = llm()
    first = EngineControl(made)
    first.submit("abc")
    first.step()
    first.fork("r1")
    again = EngineControl(made)
    assert again.submit("def") == "r2"
    again.step()
    assert EngineControl(made).fork("r1") == "r1-fork1" and EngineControl(made).fork("r1") == "r1-fork3"


def test_submit_without_a_tokenizer_is_refused_in_plain_words():
    made = llm()
    made.tokenizer = None
    panel = explore(made)
    buttons(panel)["submit"].click()
    assert "this model has no tokenizer" in panel.message.value


def test_abort_ends_all_samples_of_a_prompt():
    control = EngineControl(llm())
    control.submit("abcd", max_tokens=8, n=3)
    control.step()
    names = list(control.recorder.at().requests)
    assert len(names) == 3
    control.abort(names[1])
    assert control.recorder.at().requests == {} and not control.is_busy


def test_explorer_refuses_an_llm_without_a_record():
    with pytest.raises(ValueError, match=r"create it with LLM\(…, record=True\)"):
        explore(llm(record=False))


def test_explorer_of_a_record_has_no_buttons_and_escapes_names():
    engine = ToyEngine()
    engine.add("<img src=x onerror=alert(1)>", 5, 3)
    panel = explore(engine.run().recorder)
    assert buttons(panel) == {}
    panel.step_slider.value = 1
    assert "step 1 " in words(panel)
    assert "<img" not in words(panel) and "&lt;img src=x" in words(panel)


def test_explorer_survives_any_error_of_a_custom_part():
    made = llm()
    panel = explore(made)
    buttons(panel)["submit"].click()
    whole, made.engine.runner.run = made.engine.runner.run, lambda *_: {}["no such <b>key</b>"]
    buttons(panel)["step"].click()
    assert "no such &lt;b&gt;key&lt;/b&gt;" in panel.message.value
    made.engine.runner.run = whole
    buttons(panel)["step"].click()
    assert panel.message.value == "" and "owned" in words(panel)


def test_engine_control_serves_beside_requests_added_by_hand():
    made = llm()
    control = EngineControl(made)
    made.engine.add_request("mine", prompt(5), SamplingParams(max_tokens=2, temperature=0))
    control.submit("abc")
    control.step()
    assert list(control.recorder.at().requests) == ["mine", "r1"]
