"""`labcore check FILE --exercises-only`: definitions and checks alone give the verdicts of a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import mini_course
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labcore.cli import main as cli
from labcore.course import exercises as specs
from labcore.course.author.notebooks import read_notebook
from labcore.course.learner.exercise import notebook_exercises
from labcore.course.learner.exercises_only import exercises_only

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def slim(*sources: str) -> list[str]:
    return [cell.source for cell in exercises_only(new_notebook(cells=[new_code_cell(s) for s in sources])).cells]


def test_exercises_only_keeps_definitions_constants_and_checks():
    assert slim(
        "import os\nfrom x import y\nprint(os)",
        "SIZE = compute()\nn = 4\nrun(model)\nbig = load()\nrows = [1, -2]",
        "@jit\ndef f(x):\n    return x\nf(3)",
        'check("02.free", Pool)\nPool = or_reference("02.free", Pool)\nPool(3)',
    ) == [
        "import os\nfrom x import y",
        "SIZE = compute()\nn = 4\nrows = [1, -2]",
        "@jit\ndef f(x):\n    return x",
        'check("02.free", Pool)\nPool = or_reference("02.free", Pool)',
    ]


def test_exercises_only_keeps_a_broken_cell_whole_and_leaves_the_notebook_alone():
    notebook = new_notebook(cells=[new_code_cell("def f(:\n    pass\nprint(1)"), new_code_cell("print(2)")])
    assert [cell.source for cell in exercises_only(notebook).cells] == ["def f(:\n    pass\nprint(1)", ""]
    assert notebook.cells[1].source == "print(2)"


@pytest.mark.slow
@pytest.mark.parametrize("number", ["00", "01", "02", "03", "04", "05", "06"])
def test_exercises_only_gives_the_verdicts_of_the_masters(number, capsys):
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    assert cli.main(["check", str(path), "--exercises-only", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    ids = [exercise.id for exercise in notebook_exercises(number)]
    assert [e["state"] for e in data["exercises"]] == ["done"] * len(ids)
    assert [text.split()[0] for text in data["verdicts"]] == ids


def test_exercises_only_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(specs, "__path__", [*specs.__path__, str(mini_course.HERE)])
    (path,) = NOTEBOOKS.glob("00_*.ipynb")
    notebook = read_notebook(path)
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and "def blocks_for" in cell.source]
    cell.source = "def blocks_for(num_tokens, block_size):\n    return num_tokens // block_size + 1"
    copy = tmp_path / path.name
    copy.write_text(json.dumps(notebook), encoding="utf-8")
    assert cli.main(["check", str(copy), "--exercises-only"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("00.blocks_for   not yet — ") and "one block too many" in said and "  not yet  00.blocks_for" in said


def test_exercises_only_is_for_a_file(capsys):
    assert cli.main(["check", "02", "--exercises-only"]) == 2
    assert "--exercises-only is for a notebook file to run" in capsys.readouterr().err
