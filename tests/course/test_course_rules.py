"""Each rule for notebooks finds the fault that it is there for, and a good notebook breaks none."""

from __future__ import annotations

import mini_course
import pytest
from mini_course import cell, printed, write
from nbformat.v4 import new_notebook, new_output

from labcore.cli import main as cli
from labcore.course import exercises as specs
from labcore.course.author import rules
from labcore.course.author.notebooks import clean, code_cells, notebook_text
from labcore.course.author.rules import RULES, SECTIONS, rules_broken
from labcore.course.curriculum import Lesson
from labcore.course.learner.claims import Claim

CLAIM = Claim("util", "paging uses over 90 % of KV memory", "holds", 96.3, "%", "quoted", "a paper", "77")
OPENING = "# A mini notebook\n\nTwo minutes on CPU and GPU. Prerequisites: none. The code lands in `labcore/kvcache/blocks.py`."
RECAP = "## Recap\n\nWho owns a block? Who frees it? When?\n\nNext: nothing."


@pytest.fixture(autouse=True)
def mini_lessons(monkeypatch):
    monkeypatch.setattr(specs, "__path__", [*specs.__path__, str(mini_course.HERE)])
    monkeypatch.setattr(rules, "lesson", lambda number: Lesson("77_mini", ("kvcache.blocks",)) if number == "77" else None)
    monkeypatch.setattr(rules, "load_claims", lambda: [CLAIM])


def good():
    """A notebook with every section, three exercises and stored outputs, as short as can be."""
    text = {section: cell("markdown", f"## {section.capitalize()}") for section in SECTIONS[:-1]}
    headlines = [f"{e.headline(n)}\nText." for n, e in enumerate(mini_exercises(), 1)]
    cells = [cell("markdown", OPENING), text["set-up"], cell("code", "from labcore.course import check, ledger")]
    cells += [text["feel the pain"], cell("markdown", headlines[0]), cell("code", 'check("77.allocate", 1)')]
    cells += [text[s] for s in SECTIONS[2:7]]
    cells += [cell("markdown", headlines[1]), cell("code", 'check("77.total", 6)'), cell("markdown", headlines[2])]
    cells += [cell("code", 'check("77.leak", 3)'), *(text[s] for s in SECTIONS[7:11]), cell("code", 'ledger("util")')]
    cells += [text["how vllm"], cell("markdown", RECAP)]
    notebook = clean(new_notebook(cells=cells))
    for count, (_, code) in enumerate(code_cells(notebook), 1):
        code.execution_count = count
    return notebook


def mini_exercises():
    from labcore.course.learner.exercise import notebook_exercises

    return notebook_exercises("77")


def broken(tmp_path, notebook, name="77_mini.ipynb"):
    return rules_broken(write(tmp_path, notebook, name))


def numbered(*cells):
    """The good notebook with more code cells at its end, numbered on."""
    notebook = good()
    notebook.cells += cells
    for count, (_, code) in enumerate(code_cells(notebook), 1):
        code.execution_count = count
    return clean(notebook)


def with_output(output):
    code = cell("code", "1")
    code.outputs = [output]
    return numbered(code)


def tagged(source, *tags, twice=False):
    code = [cell("code", source) for _ in range(2 if twice else 1)]
    for each in code:
        each.metadata["tags"] = list(tags)
    return numbered(*code)


def changed(old, new):
    notebook = good()
    for each in notebook.cells:
        each.source = each.source.replace(old, new)
    return clean(notebook)


def test_a_good_notebook_breaks_no_rule(tmp_path):
    assert broken(tmp_path, good()) == []


@pytest.mark.parametrize(
    ("notebook", "sentence"),
    [
        (lambda: numbered(cell("code", "\n".join("x = 1" for _ in range(31)))), "31 lines, a cell has at most 30"),
        (
            lambda: numbered(*(cell("code", "x = 1\n" * 9 + f"x = {n}") for n in range(9))),
            "the median code cell has 10 lines",
        ),
        (lambda: tagged("1 + 1", "nbval-ignore-output"), "its output is ignored, so it must hold an `assert`"),
        (lambda: tagged("assert 1", "nbval-ignore-output", twice=True), "29% of the code cells have ignored outputs"),
        (lambda: tagged("1", "nbval-skip"), "the tag nbval-skip has no place here"),
        (lambda: tagged("1", "raises-exception"), "the tag raises-exception has no place here"),
        (lambda: numbered(cell("code", "# NBVAL_IGNORE_OUTPUT\n1")), "a NBVAL_… comment"),
        (lambda: with_output(new_output("stream", name="stderr", text="careful")), "stores stderr"),
        (lambda: with_output(new_output("error", ename="E", evalue="", traceback=[])), "stores an error"),
        (lambda: with_output(printed("read /home/ana/model.bin")), "its output shows an absolute path"),
        (lambda: with_output(printed("C:\\Users\\ana")), "its output shows an absolute path"),
        (lambda: with_output(printed("<Pool at 0x7f3a2c1d>")), "its output shows a memory address"),
        (lambda: with_output(printed("started 12:03:44")), "its output shows a clock time or a date"),
        (lambda: with_output(printed("Wall time: 3 ms")), "its output shows a clock time or a date"),
        (lambda: with_output(new_output("display_data", {"text/html": "<a href=/home/x.png>"})), "an absolute path"),
        (lambda: with_output(printed("x" * 1_000_000)), "bytes; it must stay below 1,000,000"),
        (lambda: changed("# A mini notebook", "A mini notebook"), "opens with the title"),
        (lambda: changed("Prerequisites", "Needed"), "the first cell doesn't mention prerequisites"),
        (lambda: changed("labcore/kvcache/blocks", "labcore/kvcache/block"), "the first cell doesn't mention kvcache.blocks"),
        (lambda: changed("## Oracle", "## Comparison"), "section “oracle” is missing"),
        (lambda: changed("## Predict", "Predict"), "section “predict” is missing"),
        (lambda: changed("## Set-up", "## Begin"), "section “set-up” is missing"),
        (lambda: changed("When?", "When."), "the recap asks fewer than three questions"),
        (lambda: changed("Next: nothing.", "The end."), "the recap doesn't say what comes next"),
        (lambda: changed('check("77.allocate", 1)', "1"), "the first check is in cell 13 of 22"),
        (lambda: changed("check(", "chec("), "no exercise is checked"),
        (
            lambda: changed('check("77.total"', 'check("77.totals"'),
            "77.totals: is checked, but isn't in labcore/course/exercises/nb77",
        ),
        (lambda: changed('check("77.total", 6)', "6"), "77.total: is checked 0 times, must be once"),
        (lambda: numbered(cell("code", 'check("77.total", 7)')), "77.total: is checked 2 times, must be once"),
        (
            lambda: changed("a sum · 2 min", "a sum · 3 min"),
            "77.total: no text has its headline, **Exercise 77.2 · a sum · 2 min",
        ),
        (lambda: changed('ledger("util")', "1"), "claim 'util' is this notebook's, but no ledger(…) shows it"),
    ],
)
def test_each_rule_finds_its_fault(tmp_path, notebook, sentence):
    problems = broken(tmp_path, notebook())
    assert any(sentence in problem for problem in problems), problems


def test_cells_run_out_of_order_are_found(tmp_path):
    notebook = good()
    notebook.cells[5].execution_count = 7
    assert broken(tmp_path, notebook) == ["execution counts are not 1 … 5: run the notebook in a fresh kernel."]


def test_a_file_that_is_not_in_canonical_form_is_found(tmp_path):
    path = write(tmp_path, good())
    path.write_text(path.read_text().replace('"nbformat_minor": 5', '"nbformat_minor":  5'))
    assert rules_broken(path) == ["the file isn't as `labcore course run` writes it: run it on this notebook."]


def test_widget_state_and_a_foreign_kernel_are_found(tmp_path):
    notebook = good()
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    notebook.metadata["kernelspec"]["name"] = "my-env"
    problems = broken(tmp_path, notebook)
    assert "metadata.widgets must go" in problems
    assert "kernel is 'my-env'; it must be 'python3'" in problems


def test_a_notebook_with_too_few_exercises_or_no_bug_hunt_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "notebook_exercises", lambda number: mini_exercises()[:2])
    problems = broken(tmp_path, good())
    assert "2 exercises; a notebook has at least 3" in problems
    assert "none of the exercises is a bug hunt" in problems


def test_a_notebook_without_a_lesson_or_with_another_name_is_found(tmp_path):
    assert any("the course has no lesson 78" in problem for problem in broken(tmp_path, good(), "78_mini.ipynb"))
    assert any("the course calls it 77_mini.ipynb" in problem for problem in broken(tmp_path, good(), "77_maxi.ipynb"))


@pytest.mark.parametrize(
    "source",
    [
        "from labcore.kvcache.blocks import BlockPool\nBlockPool.free = None",
        "import labcore.kvcache.blocks\nlabcore.kvcache.blocks.BlockPool = None",
        "import labcore.kvcache.blocks as b\nb.BlockPool.free = None",
        "from labcore.kvcache.blocks import BlockPool as B\nsetattr(B, 'free', None)",
        "from labcore.kvcache.blocks import BlockPool\ndel BlockPool.free",
        "class Own:\n    pass\nOwn.free = len",
    ],
)
def test_monkey_patching_is_found(tmp_path, source):
    problems = broken(tmp_path, numbered(cell("code", source)))
    assert len(problems) == 1 and "from outside; leave a seam, or subclass it" in problems[0]


@pytest.mark.parametrize(
    "source",
    [
        "import plotly.io as pio\npio.renderers.default = 'svg'",
        "import os\nos.environ['A'] = 'b'",
        "class A:\n    def f(self):\n        self._x = 1\n        return self._x, self.__class__",
    ],
)
def test_ordinary_assignments_are_no_patches(tmp_path, source):
    assert broken(tmp_path, numbered(cell("code", source))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._x",
        "from labcore.kvcache.blocks import BlockPool as P\nP._enqueue",
        "from os import _exit",
        "import a._b",
    ],
)
def test_private_names_of_others_are_found(tmp_path, source):
    assert any(
        "is private" in problem for problem in broken(tmp_path, numbered(cell("code", source)))
    )


def test_a_later_notebook_may_not_define_what_an_earlier_one_owns(tmp_path):
    first = cell("code", "# labcore: kvcache.blocks.BlockPool\nclass BlockPool: ...")
    write(tmp_path, clean(new_notebook(cells=[first])), "02_block_allocator.ipynb")
    again = numbered(cell("code", "class BlockPool: ..."))
    assert broken(tmp_path, again) == ["cell 23: defines BlockPool, which notebook 02 owns: import it"]


def test_authors_are_told_by_the_command(tmp_path, capsys):
    write(tmp_path, good())
    assert cli.main(["course", "rules", "--notebooks", str(tmp_path)]) == 0
    assert "77_mini.ipynb                       keeps every rule" in capsys.readouterr().out
    path = write(tmp_path, changed("When?", "When."))
    assert cli.main(["course", "rules", "77", "--notebooks", str(tmp_path)]) == 1
    assert "  the recap asks fewer than three questions" in capsys.readouterr().out
    assert notebook_text(changed("When?", "When.")) == path.read_text()


def test_every_rule_is_told_by_a_name_that_is_a_sentence():
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
