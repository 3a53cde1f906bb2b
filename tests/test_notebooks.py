"""Every notebook of the course keeps the course's rules. What they are, and why: `labcore.course.rules`."""

from __future__ import annotations

from pathlib import Path

import pytest

from labcore.course.claims import load_claims
from labcore.course.house import HOUSE, notebook_files
from labcore.course.notebooks import read_notebook
from labcore.course.rules import RULES, Written, strictly_compared_share

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = notebook_files(FOLDER)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, rule):
    assert rule(Written(path, read_notebook(path))) == []


def test_the_folder_holds_nothing_but_rooms_of_the_house():
    names = {path.stem for path in FOLDER.glob("*.ipynb")}
    assert names and names <= {room.notebook for room in HOUSE}


def test_most_outputs_are_compared_in_full():
    assert strictly_compared_share(FOLDER) >= 0.8


def test_every_claim_belongs_to_a_notebook_of_the_house():
    assert {claim.notebook for claim in load_claims()} <= {room.number for room in HOUSE}
