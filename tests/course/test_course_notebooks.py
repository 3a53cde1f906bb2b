"""Notebook files: read strictly, tidied the same way each time, executed whole or not at all."""

from __future__ import annotations

import json
from functools import partial

import nbformat
import pytest
from mini_course import cell, printed, write
from nbformat.v4 import new_notebook, new_output

from labcore.cli import main as cli
from labcore.course.author.notebooks import (
    CellFailed,
    MalformedNotebook,
    clean,
    execute,
    merge_streams,
    notebook_text,
    parse_cell,
    read_notebook,
    run_notebook,
)


def notebook(*cells):
    return new_notebook(cells=list(cells), metadata={"language_info": {"name": "python", "version": "3.11.7"}})


def test_what_differs_from_run_to_run_is_taken_out():
    code = cell("code", "1 + 1\n\n")
    code.metadata = {"execution": {"iopub.execute_input": "2026-01-01T00:00:00"}, "tags": ["answer"], "collapsed": True}
    code.outputs = [
        new_output(
            "display_data",
            {"text/plain": "IntSlider(value=3)", "application/vnd.jupyter.widget-view+json": {"model_id": "5f3a"}},
        )
    ]
    untidy = notebook(code)
    untidy.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    tidy = clean(untidy)
    assert tidy.metadata == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert tidy.cells[0].metadata == {"tags": ["answer"]}
    assert tidy.cells[0].source == "1 + 1"
    assert tidy.cells[0].outputs[0].data == {"text/plain": "IntSlider(value=3)"}


def test_tidying_twice_changes_nothing():
    once = notebook_text(clean(notebook(cell("code", "1"), cell("code", "1"), cell("markdown", "text"))))
    assert notebook_text(clean(nbformat.reads(once, 4))) == once


def test_a_cell_keeps_its_id_when_others_come_before_it():
    alone = clean(notebook(cell("code", "x = 1"))).cells[0].id
    tidy = clean(notebook(cell("code", "x = 0"), cell("code", "x = 1"), cell("code", "x = 1")))
    assert tidy.cells[1].id == alone
    assert len({c.id for c in tidy.cells}) == 3


def test_printed_text_reads_the_same_however_it_was_cut_into_messages():
    error = new_output("stream", name="stderr", text="careful\n")
    pieces = [printed("one\n"), printed("two\n"), error, printed("three\n"), printed("four\n")]
    whole = [printed("one\ntwo\n"), error, printed("three\nfour\n")]
    assert merge_streams(pieces) == whole


def test_a_notebook_is_executed_in_place_and_tidied(tmp_path):
    path = write(
        tmp_path,
        notebook(cell("code", "import sys\nprint(1, flush=True)\nprint(2, flush=True)"), cell("code", "6 * 7")),
    )
    run_notebook(path)
    done = read_notebook(path)
    assert [c.execution_count for c in done.cells] == [1, 2]
    assert done.cells[0].outputs == [printed("1\n2\n")]
    assert done.cells[1].outputs[0].data == {"text/plain": "42"}
    assert path.read_text() == notebook_text(clean(read_notebook(path)))


def test_a_cell_that_fails_is_named_and_the_file_stays_as_it_was(tmp_path, capsys):
    path = write(
        tmp_path, notebook(cell("markdown", "text"), cell("code", "1"), cell("code", "1 / 0"), cell("code", "2"))
    )
    before = path.read_bytes()
    with pytest.raises(CellFailed, match="77_mini.ipynb, cell 3: ZeroDivisionError: division by zero"):
        run_notebook(path)
    assert path.read_bytes() == before
    assert cli.main(["course", "run", "--notebooks", str(tmp_path)]) == 1
    assert "cell 3: ZeroDivisionError" in capsys.readouterr().err


def test_a_notebook_that_is_edited_while_it_runs_keeps_the_edit(tmp_path):
    path = write(tmp_path, notebook(cell("code", "open('77_mini.ipynb', 'a').write(' ')")))
    edited = path.read_bytes() + b" "
    with pytest.raises(CellFailed, match="77_mini.ipynb was edited while it ran"):
        run_notebook(path)
    assert path.read_bytes() == edited


def test_a_kernel_that_dies_is_reported(tmp_path):
    path = write(tmp_path, notebook(cell("code", "import os\nos._exit(1)")))
    with pytest.raises(CellFailed, match="77_mini.ipynb, cell 1: its kernel died"):
        run_notebook(path)


def test_a_cell_that_never_ends_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("labcore.course.author.notebooks.execute", partial(execute, limit=1))
    path = write(tmp_path, notebook(cell("markdown", "text"), cell("code", "while True:\n    print(1)")))
    with pytest.raises(CellFailed, match="77_mini.ipynb, cell 2: it was still running after 1 s"):
        run_notebook(path)


def test_progress_stays_out_of_the_folder_while_the_course_runs_its_notebooks(tmp_path):
    path = write(tmp_path, notebook(cell("code", "import os\nos.environ['LABCORE_PROGRESS']")))
    run_notebook(path)
    assert read_notebook(path).cells[0].outputs[0].data["text/plain"] == "'off'"


def test_old_notebooks_get_cell_ids(tmp_path):
    old = {
        "nbformat": 4,
        "nbformat_minor": 2,
        "metadata": {},
        "cells": [{"cell_type": "markdown", "metadata": {}, "source": ["text"]}],
    }
    path = tmp_path / "77_old.ipynb"
    path.write_text(json.dumps(old))
    assert read_notebook(path).cells[0].id


def test_a_missing_file_is_a_malformed_notebook(tmp_path):
    with pytest.raises(MalformedNotebook, match="77_none.ipynb: can't be read"):
        read_notebook(tmp_path / "77_none.ipynb")


def test_magics_are_no_obstacle_to_reading_a_cell():
    assert parse_cell("%load_ext x\nif True:\n    !ls\ny = 2").body
    assert parse_cell("%%bash\nls") is None
    assert parse_cell("x = (") is None


def test_an_unknown_number_is_refused_with_those_there_are(tmp_path, capsys):
    write(tmp_path, notebook(cell("code", "1")))
    assert cli.main(["course", "run", "03", "--notebooks", str(tmp_path)]) == 2
    assert "there is no notebook 03; there are 77." in capsys.readouterr().err
