"""Pictures in notebook files and exports: small, the same from run to run, and never blank where no JavaScript runs."""

from __future__ import annotations

import json
import warnings

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from labcore.viz.figure import PLOTLY_MIME

SETUP = """
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.recorder import Recorder
from labcore.viz import block_map, block_tables, explore, memory, queues, text_view, timeline
pool, recorder = BlockPool(8, 4), Recorder(8, 4, max_model_len=16)
ana = BlockTable(pool)
for _ in range(4):
    ana.append(3)
    recorder.observe({"ana": ana}, pool)
"""
CELLS = [
    SETUP, "block_map(recorder)", "block_tables(recorder)", "timeline(recorder)", "memory(recorder)",
    "queues(recorder)", "text_view(recorder, 2)", "explore(recorder)",
]  # fmt: skip

pytestmark = pytest.mark.slow


def executed() -> nbformat.NotebookNode:
    """The cells, run in a fresh kernel, as they are stored."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return NotebookClient(notebook, timeout=120, store_widget_state=False).execute()


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    return executed()


def test_figure_is_one_output_of_plotly_json_and_text(notebook):
    for cell in notebook.cells[1:6]:
        (output,) = cell.outputs
        assert output.output_type == "execute_result"
        assert set(output.data) == {PLOTLY_MIME, "text/plain"}
        assert len(json.dumps(output, indent=1)) < 60_000
    assert "plotly.js" not in json.dumps(notebook) and "widgets" not in notebook.metadata


def test_text_view_is_shown_as_it_is(notebook):
    (output,) = notebook.cells[6].outputs
    assert output.data["text/plain"].splitlines() == [
        "step 2   8 blocks: 2 owned, 0 shared, 0 cached, 6 free",
        "block   0  ana(0)  refcount 1  4/4",
        "block   1  ana(1)  refcount 1  2/4",
    ]


def test_figure_is_stored_the_same_in_a_second_run(notebook):
    again = executed()
    for first, second in zip(notebook.cells[1:7], again.cells[1:7], strict=True):
        assert first.outputs == second.outputs


def test_explorer_stores_a_figure_that_steps_and_its_text(notebook):
    (output,) = notebook.cells[7].outputs
    assert output.data[PLOTLY_MIME] == notebook.cells[1].outputs[0].data[PLOTLY_MIME]
    assert len(output.data[PLOTLY_MIME]["frames"]) == 4
    first, second, *_ = output.data["text/plain"].splitlines()
    assert first == "explorer (run the cell for the live panel)"
    assert second.startswith("step 4   8 blocks: 3 owned")


def test_figure_is_text_in_an_html_export_without_warnings(notebook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html, _ = HTMLExporter().from_notebook_node(notebook)
    for cell in notebook.cells[1:]:
        assert cell.outputs[0].data["text/plain"].splitlines()[0] in html, cell.source
