"""The student edition: no solution left in it, nothing else lost, nobody's work overwritten, and it runs to its end."""

from __future__ import annotations

import ast
import base64
import copy
import json
import os
from pathlib import Path

import mini_course
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_course import cell, mini_notebook, printed, write
from nbformat.v4 import new_notebook, new_output

from labcore.cli import main as cli
from labcore.course import exercises as specs
from labcore.course.author.notebooks import (
    MalformedNotebook,
    clean,
    code_cells,
    execute,
    notebook_text,
    parse_cell,
    read_notebook,
)
from labcore.course.author.student_edition import nbgrader_source, put_back, student_edition
from labcore.course.author.student_folder import MANIFEST, EditedWork, build
from labcore.course.curriculum import notebook_files
from labcore.course.learner.exercise import notebook_exercises

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MASTERS = notebook_files(NOTEBOOKS)
SECRETS = (
    "taken = super().allocate(n)",
    "return taken[::1] + taken[:0]",
    "total = sum(length for length in lengths)",
    "return super().free(list(blocks))",
)
each_master = pytest.mark.parametrize("path", MASTERS, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def mini_exercises(monkeypatch):
    monkeypatch.setattr(specs, "__path__", [*specs.__path__, str(mini_course.HERE)])


def edition(*more, notebook=None):
    return student_edition(notebook or mini_notebook(*more), "77_mini.ipynb")


def sources(notebook):
    return [c.source for c in notebook.cells]


def changed(old, new):
    """The mini notebook with a piece of one cell exchanged."""
    notebook = mini_notebook()
    (hit,) = (c for c in notebook.cells if old in c.source)
    hit.source = hit.source.replace(old, new)
    return notebook


class TestStubs:
    def test_a_function_keeps_signature_and_docstring_and_raises(self):
        assert sources(edition().notebook)[4] == (
            "class BlockPool(BlockPool):  # NEW\n    def allocate(self, n: int) -> list[int]:\n"
            '        """Take n blocks."""\n        raise NotImplementedError("your turn: 77.allocate")\n\n'
            'check("77.allocate", BlockPool)\nBlockPool = or_reference("77.allocate", BlockPool)'
        )

    def test_outside_of_a_function_each_name_is_an_ellipsis(self):
        assert sources(edition().notebook)[6] == "lengths = [1, 2, 3]\ntotal = ...  # your turn: 77.total"

    @pytest.mark.parametrize(
        ("solution", "stub"),
        [
            ("first, (second, *third) = lengths, (4, 5)", "first = ... second = ... third = ..."),
            ("total: int = 7", "total = ..."),
            ("for number in lengths:\n    total = number", "number = ... total = ..."),
            ("def total(a):\n    inner = 1\n    return inner", "total = ..."),
            ("class Total:\n    inner = 1", "Total = ..."),
            ("import math as m, os.path\nfrom json import loads", "m = ... os = ... loads = ..."),
            ("with open('x') as file:\n    pass", "file = ..."),
            ("print(1)", "..."),
            ("# nothing but a comment", "..."),
        ],
    )
    def test_every_kind_of_name_that_a_solution_defines_gets_its_stub(self, solution, stub):
        notebook = changed("total = sum(length for length in lengths)", solution)
        lines = sources(edition(notebook=notebook).notebook)[6].split("\n")[1:]
        assert " ".join(line.removesuffix("  # your turn: 77.total") for line in lines) == stub

    def test_a_whole_method_in_a_class_body_becomes_a_name(self):
        notebook = changed(
            "    def free(self, blocks):\n        ### BEGIN SOLUTION\n        return super().free(list(blocks))\n",
            "    ### BEGIN SOLUTION\n    def free(self, blocks):\n        return super().free(list(blocks))\n",
        )
        assert sources(edition(notebook=notebook).notebook)[9] == (
            "class LeakyPool(Plain):\n    free = ...  # your turn: 77.leak"
        )

    def test_a_marker_that_is_indented_less_than_its_code_does_no_harm(self):
        notebook = changed("        ### BEGIN SOLUTION\n        taken", "    ### BEGIN SOLUTION\n        taken")
        assert sources(edition(notebook=notebook).notebook)[4] == sources(edition().notebook)[4]

    def test_two_regions_of_one_function_get_a_stub_each(self):
        notebook = changed(
            "taken = super().allocate(n)\n",
            "taken = super().allocate(n)\n        ### END SOLUTION\n        n += 0\n        ### BEGIN SOLUTION\n",
        )
        text = sources(edition(notebook=notebook).notebook)[4]
        assert text.count('raise NotImplementedError("your turn: 77.allocate")') == 2
        assert "        n += 0\n" in text
        assert notebook_text(put_back(edition(notebook=notebook))) == notebook_text(notebook)

    def test_a_cell_tagged_solution_is_one_as_a_whole(self):
        notebook = changed("lengths = [1, 2, 3]\n### BEGIN SOLUTION\n", "lengths = [1, 2, 3]\n")
        notebook.cells[6].source = notebook.cells[6].source.replace("\n### END SOLUTION", "")
        notebook.cells[6].metadata["tags"] = ["solution"]
        assert sources(edition(notebook=notebook).notebook)[6] == (
            "lengths = ...  # your turn: 77.total\ntotal = ...  # your turn: 77.total"
        )

    def test_text_loses_its_folded_solution_and_keeps_the_answer_to_a_prediction(self):
        text = sources(edition().notebook)[3]
        assert "The parent class knows" not in text
        assert "*Your turn.*" in text and "Two blocks stay." in text

    def test_every_cell_of_the_student_edition_parses(self):
        for _, code in code_cells(edition().notebook):
            ast.parse(code.source)


class TestLeaks:
    def test_no_line_of_a_solution_is_anywhere_in_the_file(self):
        notebook = mini_notebook()
        notebook.cells[4].outputs = [printed(SECRETS[0])]
        notebook.cells[5].outputs = [new_output("display_data", {"text/html": f"<pre>{SECRETS[1]}</pre>"})]
        notebook.cells[2].metadata["solution"] = SECRETS[2]
        notebook.cells[0]["attachments"] = {"a.txt": {"text/plain": base64.b64encode(SECRETS[3].encode()).decode()}}
        notebook.cells[8].outputs = [new_output("display_data", {"application/json": {"deep": [{"er": SECRETS[2]}]}})]
        text = notebook_text(edition(notebook=notebook).notebook)
        assert [secret for secret in SECRETS if json.dumps(secret)[1:-1] in text] == []
        assert base64.b64encode(SECRETS[3].encode()).decode() not in text

    @pytest.mark.parametrize(
        "leak",
        [
            cell("code", f"# like this:\n# {SECRETS[0]}"),
            cell("markdown", f"In short: `{SECRETS[1]}`."),
            cell("markdown", f"In short: `{SECRETS[1].replace('+', '&#43;')}`."),
            cell("code", f"def test_hidden():\n    {SECRETS[2]}"),
        ],
    )
    def test_a_solution_repeated_in_another_cell_stops_the_build(self, leak):
        with pytest.raises(MalformedNotebook, match="cell 13: shows a line of a solution, `"):
            edition(leak)

    def test_a_solution_in_a_tag_stops_the_build(self):
        leak = cell("markdown", "text")
        leak.metadata["tags"] = [SECRETS[0]]
        with pytest.raises(MalformedNotebook, match="cell 13: shows a line"):
            edition(leak)

    def test_a_solution_in_a_hint_stops_the_build(self):
        notebook = changed("sum(length for length in lengths)", '"""\nOne plus two is three.\n"""')
        with pytest.raises(MalformedNotebook, match="hints of 77.total: show a line of a solution, `One plus two"):
            edition(notebook=notebook)

    def test_outputs_that_tell_how_far_the_author_was_are_removed_and_others_stay(self):
        notebook = mini_notebook()
        for _, code in code_cells(notebook):
            code.outputs, code.execution_count = [printed("words")], 1
        kept = [n for n, code in code_cells(edition(notebook=notebook).notebook) if code.outputs]
        assert kept == [2, 3, 6, 9]

    def test_an_output_tagged_answer_is_removed(self):
        notebook = mini_notebook()
        notebook.cells[8].outputs = [printed("12")]
        notebook.cells[8].metadata["tags"] = ["answer"]
        assert edition(notebook=notebook).notebook.cells[8].outputs == []

    def test_cells_without_a_solution_are_untouched(self):
        master, student = mini_notebook(), edition().notebook
        solved = {3, 4, 6, 9}
        for number, (before, after) in enumerate(zip(master.cells, student.cells, strict=True)):
            assert number in solved or before.source == after.source


class TestMalformed:
    @pytest.mark.parametrize(
        ("notebook", "sentence"),
        [
            (
                changed("        ### END SOLUTION\n\n", "\n"),
                "cell 5: line 4: `### BEGIN SOLUTION` without `### END SOLUTION`",
            ),
            (
                changed("        ### BEGIN SOLUTION\n        taken", "        taken"),
                "cell 5: line 6: `### END SOLUTION` without",
            ),
            (
                changed(
                    "        taken = super().allocate(n)",
                    "        ### BEGIN SOLUTION\n        taken = super().allocate(n)",
                ),
                "cell 5: line 5: `### BEGIN SOLUTION` inside a solution that began in line 4",
            ),
            (
                changed("### BEGIN SOLUTION\ntotal", "# BEGIN SOLUTION\ntotal"),
                "cell 7: line 2: a marker must be exactly",
            ),
            (changed("### END SOLUTION\n\ncheck", "### END SOLUTION  # done\n\ncheck"), "a marker must be exactly"),
            (
                changed('check("77.total"', 'check("77.allocate"'),
                "cell 8: exercise 77.allocate is checked for the second time.",
            ),
            (
                changed("### BEGIN SOLUTION\ntotal = sum(length for length in lengths)\n### END SOLUTION", "total = 6"),
                "cell 8: checks 77.total, but nothing above is marked as its solution.",
            ),
            (
                changed('check("77.leak", LeakyPool)', "1"),
                "cell 10: has a solution, but no check below says which exercise",
            ),
            (changed("lengths = [1, 2, 3]", "lengths = ["), "cell 7: isn't plain Python"),
            (
                changed(
                    f"        {SECRETS[0]}\n        {SECRETS[1]}\n        ### END SOLUTION",
                    "        if n:\n        ### END SOLUTION\n            return super().allocate(n)",
                ),
                "cell 5: the stub doesn't fit",
            ),
        ],
    )
    def test_each_fault_is_one_clear_line(self, notebook, sentence):
        with pytest.raises(MalformedNotebook) as caught:
            edition(notebook=notebook)
        assert any(line.startswith("77_mini.ipynb, ") and sentence in line for line in str(caught.value).splitlines())

    def test_an_unmatched_marker_in_text_is_a_fault_too(self):
        with pytest.raises(MalformedNotebook, match="cell 13: line 2: `### BEGIN SOLUTION` without"):
            edition(cell("markdown", "text\n### BEGIN SOLUTION\nmore"))

    @pytest.mark.parametrize(
        "content", ["", "not json", "{}", "[]", '{"cells": 3}', '{"nbformat": 2, "worksheets": 1}', "\xff\xfe"]
    )
    def test_a_file_that_is_no_notebook_is_named(self, tmp_path, content, capsys):
        masters = tmp_path / "masters"
        write(masters, mini_notebook())
        (masters / "78_broken.ipynb").write_bytes(content.encode("latin-1"))
        assert cli.main(["student", "build", "--notebooks", str(masters), "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("labcore: error: 78_broken.ipynb: is not ")
        assert not (tmp_path / "out").exists()

    def test_all_faults_of_all_notebooks_are_told_at_once(self, tmp_path, capsys):
        masters = tmp_path / "masters"
        write(masters, changed("### END SOLUTION\n\n", "\n"))
        write(masters, changed('check("77.total"', 'check("77.allocate"'), "78_other.ipynb")
        assert cli.main(["student", "build", "--notebooks", str(masters), "--out", str(tmp_path / "out")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert {line.split(",")[0] for line in lines} == {
            "labcore: error: 77_mini.ipynb",
            "labcore: error: 78_other.ipynb",
        }

    def test_an_exercise_belongs_to_one_notebook(self, tmp_path):
        write(tmp_path / "masters", mini_notebook())
        write(tmp_path / "masters", mini_notebook(), "78_other.ipynb")
        with pytest.raises(MalformedNotebook, match="78_other.ipynb: exercise 77.allocate is in 77_mini.ipynb, too."):
            build(tmp_path / "masters", tmp_path / "out")

    def test_a_folder_without_notebooks_is_said_to_be_one(self, tmp_path, capsys):
        assert cli.main(["student", "build", "--notebooks", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        assert "there are no notebooks here" in capsys.readouterr().err


class TestBuild:
    @pytest.fixture
    def masters(self, tmp_path):
        write(tmp_path / "masters", mini_notebook())
        write(tmp_path / "masters", mini_notebook_of(79), "79_other.ipynb")
        return tmp_path / "masters"

    def test_it_writes_every_notebook_and_a_second_time_the_same(self, masters, tmp_path):
        first = [path.read_bytes() for path in build(masters, tmp_path / "out")]
        assert [path.read_bytes() for path in build(masters, tmp_path / "out")] == first
        assert sorted(os.listdir(tmp_path / "out")) == [MANIFEST, "77_mini.ipynb", "79_other.ipynb"]

    def test_edited_work_is_not_overwritten_unless_forced(self, masters, tmp_path):
        out = tmp_path / "out"
        first, second = build(masters, out)
        fresh = second.read_text()
        second.write_text("my work")
        before = first.read_bytes()
        with pytest.raises(EditedWork, match="79_other.ipynb would be lost"):
            build(masters, out)
        assert (first.read_bytes(), second.read_text()) == (before, "my work")
        build(masters, out, force=True)
        assert second.read_text() == fresh

    def test_a_file_that_was_there_before_counts_as_edited_work(self, masters, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "77_mini.ipynb").write_text("somebody's")
        with pytest.raises(EditedWork, match="77_mini.ipynb"):
            build(masters, tmp_path / "out")

    def test_a_broken_manifest_means_nothing_is_ours(self, masters, tmp_path):
        build(masters, tmp_path / "out")
        (tmp_path / "out" / MANIFEST).write_text("{")
        with pytest.raises(EditedWork):
            build(masters, tmp_path / "out")

    def test_masters_are_never_built_over_not_even_by_force(self, masters, tmp_path, capsys):
        before = {path: path.read_bytes() for path in masters.iterdir()}
        (tmp_path / "link").symlink_to(masters)
        for out in (masters, tmp_path / "link"):
            command = ["student", "build", "--notebooks", str(masters), "--out", str(out), "--force"]
            assert cli.main(command) == 2
            assert "their solutions would be lost" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in masters.iterdir()} == before

    def test_unedited_files_follow_their_masters(self, masters, tmp_path):
        build(masters, tmp_path / "out")
        write(masters, mini_notebook(cell("markdown", "A new paragraph.")))
        build(masters, tmp_path / "out")
        assert "A new paragraph." in (tmp_path / "out" / "77_mini.ipynb").read_text()

    def test_a_build_that_dies_half_way_leaves_whole_files_and_can_be_repeated(self, masters, tmp_path, monkeypatch):
        out = tmp_path / "out"
        build(masters, out)
        write(masters, mini_notebook(cell("markdown", "New.")))
        write(masters, mini_notebook_of(79, cell("markdown", "New, too.")), "79_other.ipynb")
        replace = os.replace

        def dies(source, target):
            if Path(target).name == "79_other.ipynb":
                raise OSError(28, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(os, "replace", dies)
        with pytest.raises(OSError):
            build(masters, out)
        monkeypatch.setattr(os, "replace", replace)
        assert sorted(os.listdir(out)) == [MANIFEST, "77_mini.ipynb", "79_other.ipynb"]
        for path in notebook_files(out):
            read_notebook(path)
        build(masters, out)
        assert "New, too." in (out / "79_other.ipynb").read_text()

    def test_the_command_tells_what_it_wrote_and_what_it_would_not(self, masters, tmp_path, capsys):
        command = ["student", "build", "--notebooks", str(masters), "--out", str(tmp_path / "out")]
        assert cli.main(command) == 0
        assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == ["77_mini.ipynb", "79_other.ipynb"]
        (tmp_path / "out" / "77_mini.ipynb").write_text("my work")
        assert cli.main(command) == 1
        assert "overwrite with --force" in capsys.readouterr().err
        assert cli.main([*command, "--force"]) == 0


def test_putting_the_solutions_back_makes_the_master_again_byte_for_byte():
    notebook = mini_notebook()
    for _, code in code_cells(notebook):
        code.outputs, code.execution_count = [printed("words")], 1
    notebook.cells[2].metadata["slideshow"] = {"slide_type": "slide"}
    notebook.cells[6].metadata["tags"] = ["nbval-ignore-output"]
    taken = edition(notebook=notebook)
    assert notebook_text(taken.notebook) != notebook_text(notebook)
    assert notebook_text(put_back(taken)) == notebook_text(notebook)


STATEMENTS = st.sampled_from(
    ["secret_{} = 1", "if secret_{}:\n    pass", "for secret_{} in []:\n    continue", "return secret_{}"]
)
KEPT = st.sampled_from(["", "a = 1", '"""Words."""', "# a comment", "if a:\n    b = 2"])


@st.composite
def exercises(draw):
    """A function with kept lines and solutions in turn, at some depth of nesting, as the code of one cell."""
    depth, counter, body = draw(st.integers(0, 2)), iter(range(10_000, 99_999)), []
    for _ in range(draw(st.integers(1, 3))):
        body += draw(KEPT).split("\n")
        solution = [draw(STATEMENTS).format(f"of_the_exercise_{next(counter)}") for _ in range(draw(st.integers(1, 3)))]
        body += ["### BEGIN SOLUTION", *"\n".join(solution).split("\n"), "### END SOLUTION"]
    lines = ["def work():", *(f"    {line}" if line else "" for line in body)]
    for level in range(depth):
        lines = [f"class Around{level}:", *(f"    {line}" if line else "" for line in lines)]
    return "\n".join(lines)


@given(sources=st.lists(exercises(), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_whatever_the_exercises_nothing_leaks_and_nothing_is_lost(sources):
    cells = [
        c for n, source in enumerate(sources) for c in (cell("code", source), cell("code", f'check("88.x{n}", 1)'))
    ]
    master = clean(new_notebook(cells=cells))
    taken = student_edition(master, "88_any.ipynb")
    assert "secret_" not in notebook_text(taken.notebook)
    assert all(parse_cell(code.source) is not None for _, code in code_cells(taken.notebook))
    assert notebook_text(put_back(taken)) == notebook_text(master)


def test_cells_carry_what_nbgrader_wants_to_know():
    cells = edition().notebook.cells
    together, alone, check = (cells[n].metadata["nbgrader"] for n in (4, 6, 7))
    assert together == {
        "grade": True, "grade_id": "77-allocate", "locked": False, "points": 1, "schema_version": 3, "solution": True,
        "task": False,
    }  # fmt: skip
    assert (alone["grade"], alone["solution"], alone["locked"], alone["grade_id"]) == (False, True, False, "77-total")
    assert (check["grade"], check["solution"], check["locked"]) == (True, False, True)
    assert (check["grade_id"], check["points"]) == ("77-total-check", 1)
    assert "nbgrader" not in cells[5].metadata


def test_nbgraders_source_has_the_solutions_between_their_markers_and_nothing_folded_away():
    source, master = nbgrader_source(edition()), mini_notebook()
    assert [c.source for c in source.cells if c.cell_type == "code"] == [
        c.source for c in master.cells if c.cell_type == "code"
    ]
    assert "The parent class knows" not in source.cells[3].source
    assert source.cells[4].metadata["nbgrader"]["grade_id"] == "77-allocate"


def test_the_command_builds_nbgraders_source_on_request(tmp_path):
    write(tmp_path / "masters", mini_notebook())
    command = ["student", "build", "--notebooks", str(tmp_path / "masters"), "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--nbgrader-source"]) == 0
    assert SECRETS[0] in (tmp_path / "out" / "77_mini.ipynb").read_text()
    assert cli.main(command) == 0  # ours, unedited: the student edition may take its place
    assert SECRETS[0] not in (tmp_path / "out" / "77_mini.ipynb").read_text()


def test_nbgrader_itself_accepts_the_metadata(tmp_path):
    formats = pytest.importorskip("nbgrader.nbgraderformat")
    path = write(tmp_path, edition().notebook)
    notebook = formats.read(str(path), as_version=4)
    formats.MetadataValidator().validate_nb(notebook)
    assert sum(bool(c.metadata.get("nbgrader")) for c in notebook.cells) == 5


@pytest.mark.slow
def test_run_all_on_the_student_edition_comes_to_its_end_with_every_exercise_open(tmp_path):
    write(tmp_path / "masters", mini_notebook())
    (path,) = build(tmp_path / "masters", tmp_path / "out")
    notebook = read_notebook(path)
    execute(notebook, path.parent)
    said = outputs(notebook)
    for exercise in notebook_exercises("77"):
        assert f"{exercise.id}   not yet — " in said
    assert "0 of 3 exercises done, about 20 minutes left" in said
    assert "(2, 4)" in said and "12" in said  # the cells below went on with the reference


@pytest.mark.slow
def test_run_all_on_the_master_finds_every_exercise_done(tmp_path):
    path = write(tmp_path, mini_notebook())
    notebook = read_notebook(path)
    execute(notebook, tmp_path)
    assert "3 of 3 exercises done, complete" in outputs(notebook)
    assert "not yet" not in outputs(notebook)


@each_master
def test_a_real_notebook_has_a_student_edition_that_parses_and_leaks_nothing(path):
    master = read_notebook(path)
    taken = student_edition(master, path.name)
    text = notebook_text(taken.notebook)
    assert [line for line in taken.solution_lines() if json.dumps(line, ensure_ascii=False)[1:-1] in text] == []
    for number, code in code_cells(taken.notebook):
        ast.parse(
            "\n".join("pass" if line[:1] in "%!" and line else line for line in code.source.split("\n")),
            f"cell {number}",
        )
    assert notebook_text(put_back(taken)) == path.read_text(encoding="utf-8")


@each_master
def test_nbgrader_grades_every_exercise_by_itself(path):
    """Case: 29 of 31 checks stood in the solution's cell, which nbgrader leaves to the teacher: no points."""
    source = nbgrader_source(student_edition(read_notebook(path), path.name))
    graded = [c for c in source.cells if c.metadata.get("nbgrader", {}).get("grade")]
    assert [c.metadata["nbgrader"]["grade_id"].removesuffix("-check") for c in graded] == [
        exercise.id.replace(".", "-") for exercise in notebook_exercises(path.stem[:2])
    ]
    for each in graded:  # a locked cell without a solution: what `determine_grade` calls autograded
        assert each.metadata["nbgrader"]["locked"] and not each.metadata["nbgrader"]["solution"]
        assert each.metadata["nbgrader"]["points"] > 0 and "check(" in each.source


@each_master
@pytest.mark.slow
@pytest.mark.model
def test_run_all_on_a_real_student_edition_comes_to_its_end_with_every_cell_run_twice(path):
    """As people run cells: again, up to the oracle. The measurements take minutes, ask for no exercise, and run elsewhere."""
    notebook = student_edition(read_notebook(path), path.name).notebook
    measures = next((i for i, c in enumerate(notebook.cells) if "## Measure" in c.source), len(notebook.cells))
    assert not any("check(" in c.source for c in notebook.cells[measures:]), "an exercise behind the measurements"
    del notebook.cells[measures:]
    built = next((i for i, c in enumerate(notebook.cells) if "## Oracle" in c.source), measures)
    again = [copy.deepcopy(c) for c in notebook.cells[:built] for _ in range(1 + (c.cell_type == "code"))]
    notebook.cells = again + notebook.cells[built:]
    execute(notebook, NOTEBOOKS)
    said = outputs(notebook)
    for exercise in notebook_exercises(path.stem[:2]):
        assert f"{exercise.id}   not yet — " in said


def outputs(notebook):
    texts = [
        o.get("text", "") + str(o.get("data", {}).get("text/plain", ""))
        for _, c in code_cells(notebook)
        for o in c.outputs
    ]
    return "\n".join(texts)


def mini_notebook_of(number, *more):
    """The mini notebook without exercises, under another number."""
    notebook = mini_notebook(*more)
    notebook.cells = [notebook.cells[0], *notebook.cells[12:]]
    return notebook
