"""Promotion: notebook and package are one, symbol by symbol; and labcore's own notebooks keep to it."""

from __future__ import annotations

import ast
import itertools
import tempfile
from pathlib import Path

import mini_course
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_notebook

from labcore.course.author import promotion
from labcore.course.author.notebooks import clean
from labcore.course.author.promotion import PACKAGE, collect, compare, differences, marked_names, members, public_symbols
from labcore.course.curriculum import LESSONS, Lesson

NOTEBOOKS = PACKAGE.parent / "notebooks"
LESSON = (Lesson("02_blocks", ("blocks",)),)

MODULE = '''"""Blocks. Built in notebook 02."""

from __future__ import annotations

LIMIT: int = 4


class OutOfBlocks(RuntimeError):
    """None left."""


class Pool(object):
    """A pool."""

    kind = "paged"

    def __init__(self, size: int) -> None:
        self.size = size    # blocks

    def take(self, n: int = 1) -> list[int]:
        """Take n."""
        return [self.size - i for i in range(n)]

    @property
    def empty(self) -> bool:
        return self.size == 0


def blocks_for(tokens: int) -> int:
    """How many."""
    return -(-tokens // LIMIT)


def _private() -> None:
    """Nobody needs to own this."""
'''

CELLS = [
    "import math",
    "# labcore: blocks.LIMIT\nLIMIT: int = 4\nLIMIT * 2",
    "# labcore: blocks.OutOfBlocks\nclass OutOfBlocks(RuntimeError): ...",
    '# labcore: blocks.Pool\nclass Pool(object):\n    """Another docstring."""\n    kind = "paged"\n\n'
    "    def __init__(self, size: int) -> None:\n        # other comment\n        self.size = size",
    "# labcore: blocks.Pool.empty, .take\nclass Pool(Pool):  # NEW\n    @property\n    def empty(self) -> bool:\n"
    "        return self.size == 0\n\n    def take(self, n: int = 1) -> list[int]:\n"
    "        ### BEGIN SOLUTION\n        return [self.size - i for i in range(n)]\n        ### END SOLUTION\n\n"
    'pool = Pool(3)\npool.take(2)\ncheck("02.take", Pool)\nPool = or_reference("02.take", Pool)',
    "# labcore: blocks.blocks_for\ndef blocks_for(tokens: int) -> int:\n    return -(-tokens // LIMIT)",
]


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "blocks.py").write_text(MODULE)
    return folder


def report(tmp_path, package, cells, name="02_blocks.ipynb", lessons=LESSON):
    cells = [mini_course.cell("code", source) for source in cells]
    mini_course.write(tmp_path / "notebooks", clean(new_notebook(cells=cells)), name)
    return compare(tmp_path / "notebooks", package, lessons)


def changed(index, old, new):
    assert old in CELLS[index]
    return [*CELLS[:index], CELLS[index].replace(old, new), *CELLS[index + 1 :]]


def test_labcores_own_notebooks_and_package_agree():
    report = compare(NOTEBOOKS)
    assert report.problems == [], str(report)


def test_every_part_of_the_course_is_either_owned_or_to_come():
    report = compare(NOTEBOOKS)
    spoken_for = {*report.owned, *report.to_come}
    assert {lesson.notebook for lesson in LESSONS} <= spoken_for
    assert not set(report.owned) & set(report.to_come)


def test_comments_docstrings_and_the_order_of_methods_may_differ(tmp_path, package):
    result = report(tmp_path, package, CELLS)
    assert result.problems == []
    assert result.owned == {"02_blocks": ["blocks.LIMIT", "blocks.OutOfBlocks", "blocks.Pool", "blocks.blocks_for"]}
    assert str(result).endswith("all agree")


@pytest.mark.parametrize(
    ("cells", "symbol", "lines"),
    [
        (changed(1, "4", "5"), "blocks.LIMIT", ["-LIMIT: int = 4", "+LIMIT: int = 5"]),
        (
            changed(4, "range(n)", "range(n + 1)"),
            "blocks.Pool.take",
            ["+    return [self.size - i for i in range(n + 1)]"],
        ),
        (changed(4, "n: int = 1", "n=1"), "blocks.Pool.take", ["+def take(self, n=1) -> list[int]:"]),
        (changed(4, "    @property\n", ""), "blocks.Pool.empty", ["-@property"]),
        (changed(3, 'kind = "paged"', 'kind = "plain"'), "blocks.Pool.kind", ["-kind = 'paged'", "+kind = 'plain'"]),
        (changed(3, "class Pool(object)", "class Pool"), "blocks.Pool ", ["-class Pool(object):", "+class Pool:"]),
        (changed(5, "LIMIT", "4"), "blocks.blocks_for", ["+    return -(-tokens // 4)"]),
    ],
)
def test_any_other_difference_is_shown_as_a_diff(tmp_path, package, cells, symbol, lines):
    (problem,) = report(tmp_path, package, cells).problems
    assert problem.startswith(symbol)
    assert "notebook 02, cell" in problem and "labcore/blocks.py" in problem
    assert set(lines) <= {line[4:] for line in problem.splitlines()}


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        (
            CELLS[:4] + CELLS[5:],
            "blocks.Pool.take   notebook 02, cell 4, and labcore/blocks.py: is only in the package.",
        ),
        (CELLS[:5], "blocks.blocks_for has no owner: promote it"),
        ([*CELLS, CELLS[5]], "cell 7: defines blocks.blocks_for again; notebook 02, cell 6 has it."),
        ([*CELLS, CELLS[4]], "cell 7: defines blocks.Pool.take again; cell 5 has it."),
        (changed(4, ", .take", ""), "cell 5: defines blocks.Pool.take without naming it in its first line."),
        (changed(4, ".empty, .take", ".empty, .take, .give"), "cell 5: names blocks.Pool.give, but doesn't define it."),
        (changed(4, "class Pool(Pool)", "class Pool"), "its class line must be `class Pool(Pool):`"),
        (changed(4, ".Pool.empty, .take", ".Pool"), "opens blocks.Pool again: name the methods that it adds"),
        (changed(5, "def blocks_for", "def blocks"), "cell 6: names blocks.blocks_for, but doesn't define it."),
        (changed(5, "def blocks_for", "def helper(): ...\ndef blocks_for"), "cell 6: defines helper without naming it"),
        (changed(5, "def blocks_for", "def ("), "cell 6: is marked for promotion, but isn't plain Python."),
        (CELLS[:3] + CELLS[4:], "adds to blocks.Pool, but no earlier cell of this notebook begins it"),
        (["# labcore: blocks.Nothing\nclass Nothing: ..."], "the module doesn't define it."),
        (["# labcore: cellar.Pool\nclass Pool: ..."], "there is no such module."),
        (["1 + 1"], "blocks: notebook 02 is written, but promotes nothing into it."),
    ],
)
def test_what_is_wrong_with_a_cell_is_said_in_one_line(tmp_path, package, cells, sentence):
    problems = report(tmp_path, package, cells).problems
    assert any(sentence in problem for problem in problems), problems


def test_a_symbol_has_one_owner(tmp_path, package):
    report(tmp_path, package, CELLS)
    problems = report(tmp_path, package, [CELLS[1]], "05_more.ipynb").problems
    assert problems == ["notebook 05, cell 1: defines blocks.LIMIT again; notebook 02, cell 2 has it."]


@pytest.mark.parametrize("docstring", ["Blocks.", "Blocks. Built in notebook 04.", "Blocks, as in notebook 02."])
def test_a_module_docstring_must_name_the_notebook_of_each_symbol(tmp_path, package, docstring):
    (package / "blocks.py").write_text(MODULE.replace("Blocks. Built in notebook 02.", docstring))
    problems = report(tmp_path, package, CELLS).problems
    assert len(problems) == 4
    assert all(p.endswith('the module\'s docstring must say "Built in notebook 02."') for p in problems)


@pytest.mark.parametrize(
    ("docstring", "notebooks"),
    [
        ("The pool. Built in notebook 02.", {"02"}),
        ("The seam. Built in notebooks 04 and\n06.", {"04", "06"}),
        ("`choose` is built in notebook 03.", {"03"}),
        ("Built in notebooks 01, 04 and 06; notebook 07 reads it.", {"01", "04", "06"}),
        ("Read in notebook 02.", set()),
    ],
)
def test_builders_are_the_notebooks_of_built_in(docstring, notebooks):
    assert promotion.builders(docstring) == notebooks


def test_a_part_whose_notebook_is_not_written_is_to_come(tmp_path, package):
    lessons = (*LESSON, Lesson("03_kernels", ("kernels",)))
    result = report(tmp_path, package, CELLS, lessons=lessons)
    assert result.problems == [] and result.to_come == {"03_kernels": ("kernels",)}
    assert "03_kernels                 to come: kernels" in str(result)


def test_a_part_whose_notebook_is_written_must_exist(tmp_path, package):
    lessons = (Lesson("02_blocks", ("blocks", "kernels")),)
    (problem,) = report(tmp_path, package, CELLS, lessons=lessons).problems
    assert problem == "kernels: notebook 02 is written, but labcore/kernels has nothing in it."


def test_every_module_of_a_folder_belongs_to_the_part(tmp_path, package):
    (package / "kernels").mkdir()
    (package / "kernels" / "store.py").write_text("def store(): ...\nif True:\n    def gather(): ...\n")
    (package / "kernels" / "decode.py").write_text("try:\n    import x\nexcept ImportError:\n    def decode(): ...\n")
    assert set(public_symbols("kernels", package)) == {
        "kernels.store.store",
        "kernels.store.gather",
        "kernels.decode.decode",
    }


def test_what_is_kept_out_needs_no_owner_but_may_have_none_either(tmp_path, package, monkeypatch):
    monkeypatch.setattr(promotion, "KEPT_OUT", {"blocks.blocks_for": "too long for a cell"})
    assert report(tmp_path, package, CELLS[:5]).problems == []
    (problem,) = report(tmp_path, package, CELLS).problems
    assert problem == "blocks.blocks_for is kept out, but notebook 02 owns it."


def test_what_is_kept_out_exists():
    symbols = {name for lesson in LESSONS for part in lesson.parts for name in public_symbols(part)}
    modules = {name.rpartition(".")[0] for name in symbols}
    assert set(promotion.KEPT_OUT) <= symbols | modules


def test_a_marker_names_several_symbols():
    assert marked_names("# labcore: blocks.Pool.take, .give, blocks.LIMIT") == [
        "blocks.Pool.take",
        "blocks.Pool.give",
        "blocks.LIMIT",
    ]
    assert marked_names("x = 1\n# labcore: blocks.Pool") == []
    assert marked_names("") == []


def test_re_opened_classes_build_up_the_class_that_the_package_has():
    scope: dict = {"check": lambda *_: None, "or_reference": lambda _, obj: obj}
    for source in CELLS:
        exec(source, scope)
    pool = scope["Pool"](3)
    assert (pool.take(2), pool.empty, pool.kind) == ([3, 2], False, "paged")


def test_a_re_opened_class_is_collected_with_the_cell_of_each_method(tmp_path, package):
    report(tmp_path, package, CELLS)
    symbols, problems = collect(tmp_path / "notebooks")
    assert problems == []
    assert symbols["blocks.Pool"].cells == {"kind": 4, "__init__": 4, "empty": 5, "take": 5}


@given(
    order=st.permutations(["allocate", "free", "share", "incref", "refcount", "is_writable"]),
    cuts=st.sets(st.integers(1, 5)),
)
@settings(max_examples=12, deadline=None)
def test_however_a_class_is_cut_into_cells_it_is_the_class_of_the_package(order, cuts):
    source = (PACKAGE / "kvcache" / "blocks.py").read_text(encoding="utf-8")
    body = {name: ast.get_source_segment(source, node) for name, node in members(_class(source)).items()}
    first = [text for name, text in body.items() if name not in order]
    cells = ["# labcore: kvcache.blocks.BlockPool\nclass BlockPool:\n    " + "\n\n    ".join(first)]
    bounds = [0, *sorted(cuts), len(order)]
    for start, stop in itertools.pairwise(bounds):
        names = ", .".join(order[start:stop])
        methods = "\n\n    ".join(body[name] for name in order[start:stop])
        cells.append(f"# labcore: kvcache.blocks.BlockPool.{names}\nclass BlockPool(BlockPool):\n    {methods}")
    with tempfile.TemporaryDirectory() as folder:
        notebook = clean(new_notebook(cells=[mini_course.cell("code", cell) for cell in cells]))
        mini_course.write(Path(folder), notebook, "02_blocks.ipynb")
        symbols, problems = collect(Path(folder))
    assert problems == []
    assert differences(symbols["kvcache.blocks.BlockPool"], PACKAGE) == []


def _class(source):
    return next(node for node in ast.parse(source).body if getattr(node, "name", "") == "BlockPool")
