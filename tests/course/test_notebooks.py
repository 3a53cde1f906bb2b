"""Every notebook of the course keeps the course's rules. What they are, and why: `labcore.course.author.rules`."""

from __future__ import annotations

import re
import warnings
from html import escape
from pathlib import Path

import pytest
from nbconvert import HTMLExporter

from labcore.course.author.notebooks import read_notebook
from labcore.course.author.rules import RULES, Written, strictly_compared_share
from labcore.course.curriculum import LESSONS, notebook_files
from labcore.course.learner.claims import load_claims
from labcore.viz.figure import PLOTLY_MIME

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = notebook_files(FOLDER)
WIDGET = re.compile(r"(\w*(Box|Slider|Button|Text|Output|Dropdown|Checkbox|FigureWidget|Play)|interactive)\(\w")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, rule):
    assert rule(Written(path, read_notebook(path))) == []


def test_the_folder_holds_nothing_but_lessons_of_the_course():
    names = {path.stem for path in FOLDER.glob("*.ipynb")}
    assert names and names <= {lesson.notebook for lesson in LESSONS}


def test_most_outputs_are_compared_in_full():
    assert strictly_compared_share(FOLDER) >= 0.8


def test_every_claim_belongs_to_a_notebook_of_the_course():
    assert {claim.notebook for claim in load_claims()} <= {lesson.number for lesson in LESSONS}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_export_to_html_warns_of_nothing_and_says_every_picture_in_words(path):
    notebook = read_notebook(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page, _ = HTMLExporter().from_notebook_node(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if PLOTLY_MIME in data:
                assert escape(data["text/plain"].splitlines()[0], quote=False) in page, cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_a_widget_alone(path):
    """Where there is no kernel there is no widget: what is stored beside it must say something."""
    for cell in read_notebook(path).cells:
        for output in cell.get("outputs", ()):
            assert not WIDGET.match(output.get("data", {}).get("text/plain", "")), cell.source
