"""After a failed check the notebook goes on with the learner's class, and only the exercise's methods are borrowed."""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import types

import pytest

from labcore.course.learner.stand_in import borrowed_methods, return_borrowed, stand_in
from labcore.course.learner.verdict import CheckSession
from labcore.kvcache.blocks import BlockPool

MINE = (BlockPool.__init__, BlockPool._enqueue, BlockPool._why_not, BlockPool.free_blocks, BlockPool.refcount)
FIRST = "from collections.abc import Iterator, Sequence\nfrom labcore.kvcache.blocks import BlockError, OutOfBlocks\n"
FIRST += "class BlockPool:\n" + "\n".join(map(inspect.getsource, MINE))
"""The learner's class before exercise 2.1: in a cell, and so theirs, whatever module the text comes from."""

MY_ALLOCATE = """
class BlockPool(BlockPool):
    def allocate(self, n):
        \"\"\"Mine.\"\"\"
        if not 0 <= n <= self.num_free:
            raise OutOfBlocks("no") if n > 0 else ValueError("no")
        mine = [self._first() for _ in range(n)]
        return mine

    def _first(self):
        first = self._next[self.num_blocks]
        self._next[self.num_blocks] = self._next[first]
        self._prev[self._next[first]] = self.num_blocks
        self._refcounts[first] = 1
        self.num_free -= 1
        return first
"""
NO_ALLOCATE = """
class BlockPool(BlockPool):
    def allocate(self, n):
        raise NotImplementedError("your turn: 02.allocate")
"""
WRONG_ALLOCATE = """
class BlockPool(BlockPool):
    def allocate(self, n):
        return list(range(n))
"""
OTHERS = """
class BlockPool(BlockPool):
    def share(self, blocks):
        for block in blocks:
            self._refcounts[block] += 1
"""


class Notebook:
    """Cells in a module of their own, whose source `inspect` finds, as in a kernel."""

    def __init__(self, name: str, session: CheckSession) -> None:
        self.module = types.ModuleType(name)
        sys.modules[name] = self.module
        self.session, self.cells = session, 0

    def run(self, source: str) -> type:
        self.cells += 1
        file = f"<{self.module.__name__} cell {self.cells}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), vars(self.module))
        return self.module.BlockPool

    def exercise(self, source: str, exercise: str = "02.allocate") -> type:
        """The exercise's cell: code, check, or_reference."""
        pool = self.run(source)
        self.session.check(exercise, pool)
        self.module.BlockPool = self.session.or_reference(exercise, pool)
        return self.module.BlockPool


@pytest.fixture
def told():
    return []


@pytest.fixture
def notebook(told, request, monkeypatch, tmp_path):
    monkeypatch.setenv("LABCORE_PROGRESS", str(tmp_path / "progress.json"))
    book = Notebook(f"cells_of_{request.node.name}", CheckSession(tell=told.append))
    yield book
    del sys.modules[book.module.__name__]


def test_stand_in_borrows_only_the_failing_method_and_keeps_the_learners_class(notebook, told):
    mine = notebook.run(FIRST)
    pool = notebook.exercise(NO_ALLOCATE)
    assert issubclass(pool, mine) and not issubclass(pool, BlockPool) and borrowed_methods(pool) == {"allocate"}
    assert told[-1] == "02.allocate   not done yet: the notebook goes on with your BlockPool, and borrows labcore's allocate."
    assert pool(4, 4).allocate(2) == [0, 1] and pool.allocate is BlockPool.allocate


def test_stand_in_is_emptied_once_the_learners_own_method_passes_without_a_restart(notebook, told):
    notebook.run(FIRST)
    notebook.exercise(NO_ALLOCATE)
    notebook.run(OTHERS)
    pool = notebook.exercise(MY_ALLOCATE)  # the cell again, above those that came in between
    assert told[-1].startswith("02.allocate   done") and borrowed_methods(pool) == set()
    assert not any(BlockPool.allocate in vars(each).values() for each in pool.__mro__), "nothing of labcore's is left"
    assert not any(each.__module__.startswith("labcore") for each in pool.__mro__) and hasattr(pool, "share")


def test_stand_in_is_never_praised_as_the_learners_own(notebook, told):
    notebook.run(FIRST)
    pool = notebook.exercise(NO_ALLOCATE)
    notebook.session.check("02.allocate", pool)
    assert told[-1].startswith("02.allocate   not yet — allocate is borrowed here, until yours passes.")
    assert notebook.session.or_reference("02.allocate", pool) is pool
    notebook.session.check("02.allocate", BlockPool)
    assert told[-1].startswith("02.allocate   not yet — this is labcore's own.")


def test_stand_in_takes_the_version_that_passed_last_and_its_helpers(notebook, told):
    notebook.run(FIRST)
    notebook.exercise(MY_ALLOCATE)
    notebook.run(FIRST)
    pool = notebook.exercise(WRONG_ALLOCATE)
    assert told[-1] == "02.allocate   not done yet: the notebook goes on with your allocate as it last passed."
    assert pool.allocate.__doc__ == "Mine." and pool(4, 4).allocate(3) == [0, 1, 2]


def test_the_version_that_passed_last_is_remembered_across_restarts(notebook, told, tmp_path):
    notebook.run(FIRST)
    notebook.exercise(MY_ALLOCATE)
    saved = json.loads((tmp_path / "progress.json").read_text())
    assert saved["exercises"] == {"02.allocate": "done"}
    assert set(saved["kept"]["02.allocate"]) == {"allocate", "_first"}
    restarted = Notebook("cells_of_the_restarted_kernel", CheckSession(tell=told.append))
    restarted.run(FIRST)
    pool = restarted.exercise(NO_ALLOCATE)
    assert told[-1].endswith("your allocate as it last passed.") and pool.allocate.__doc__ == "Mine."
    del sys.modules["cells_of_the_restarted_kernel"]


def test_a_version_that_no_longer_compiles_is_passed_over(notebook, told, tmp_path):
    kept = {"02.allocate": {"allocate": "def allocate(self, n:\n"}}
    (tmp_path / "progress.json").write_text(json.dumps({"format": 1, "exercises": {}, "kept": kept}))
    notebook.run(FIRST)
    notebook.exercise(NO_ALLOCATE)
    assert told[-1].endswith("your BlockPool, and borrows labcore's allocate.")


def test_a_class_that_cannot_borrow_is_replaced_by_the_reference(notebook, told):
    notebook.run("class BlockPool:\n    def __init__(self, num_blocks, block_size):\n        self.mine = []\n")
    assert notebook.exercise(NO_ALLOCATE) is BlockPool
    assert told[-1] == "02.allocate   not done yet: the notebook goes on with labcore.kvcache.blocks.BlockPool."


def test_a_function_that_passed_last_stands_in_for_one_that_fails(notebook, told):
    good = "BlockPool = None\ndef blocks_for(tokens, block_size=16):\n    return -(-tokens // block_size)  # mine\n"
    notebook.run(good)
    notebook.session.check("00.blocks_for", notebook.module.blocks_for)
    notebook.run("def blocks_for(tokens, block_size=16):\n    return 0\n")
    mended = notebook.session.or_reference("00.blocks_for", notebook.module.blocks_for)
    assert told[-1] == "00.blocks_for   not done yet: the notebook goes on with your blocks_for as it last passed."
    assert mended(17) == 2 and mended.__module__ == notebook.module.__name__


def test_super_never_reaches_what_is_borrowed(notebook, told):
    """Case: `super().allocate(n)` was judged done on the borrowed method, which was then taken away."""
    notebook.run(FIRST)
    notebook.exercise(NO_ALLOCATE)
    delegates = "class BlockPool(BlockPool):\n    def allocate(self, n):\n        return super().allocate(n)\n"
    pool = notebook.exercise(delegates)
    assert "02.allocate   not yet — nothing is written here yet" in told[-2] and borrowed_methods(pool) == {"allocate"}
    assert pool(4, 4).allocate(2) == [0, 1], "the notebook goes on with the borrowed method"
    pool = notebook.exercise(MY_ALLOCATE)
    assert told[-1].startswith("02.allocate   done") and pool(4, 4).allocate(2) == [0, 1]


def test_return_borrowed_leaves_what_nobody_has_written_yet():
    class Mine:
        def a(self):
            return "mine"

    both = stand_in(Mine, {"a": lambda self: "ours", "b": lambda self: "ours"})
    again = type("Mine", (both,), {"a": lambda self: "mine again"})
    assert borrowed_methods(again) == {"b"}
    return_borrowed(again, ("a", "b"))
    assert "a" not in vars(both) and borrowed_methods(again) == {"b"} and again().b() == "ours"


def test_hint_without_a_number_gives_the_one_that_the_verdict_named(notebook, told):
    notebook.run(FIRST)
    notebook.session.check("02.allocate", notebook.run(WRONG_ALLOCATE))
    named = int(told[-1].rpartition("hint(")[2].partition(")")[0])
    notebook.session.hint()
    assert told[-1].startswith(f"02.allocate   hint {named} of ")
