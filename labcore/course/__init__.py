"""The course around the engine: exercises and their checks, promotion, the student edition, the hot-swap test.

In a notebook:

    from labcore.course import check, hint, ledger, or_reference, progress, swap_test

The rest of this page is for authors of notebooks. The rules that a test enforces are in `labcore.course.author.rules`;
`labcore course rules 02` lists a notebook's violations.


1. Promotion: code that lands in the package
--------------------------------------------
A part's code is written once, in the notebook, in cells whose first line names what they define, by its path in
labcore:

    # labcore: kvcache.blocks.BlockPool
    class BlockPool:
        \"\"\"A fixed number of KV blocks.\"\"\"

        def __init__(self, num_blocks: int, block_size: int) -> None:
            ...

A class grows one method at a time by being opened again, in plain Python: a subclass of the same name. The first cell
names the class, each later one the methods that it adds:

    # labcore: kvcache.blocks.BlockPool.allocate
    class BlockPool(BlockPool):                                     # NEW
        def allocate(self, n: int) -> list[int]:
            ...

    # labcore: kvcache.blocks.BlockPool.share, .refcount, .is_writable
    class BlockPool(BlockPool):                                     # NEW
        ...

    # labcore: kvcache.blocks.OutOfBlocks, kvcache.blocks.BlockError
    class OutOfBlocks(RuntimeError): ...

Why a subclass and no decorator: the cell looks as the method looks in the package, it can be run twice, and nothing
is patched, so a learner's incomplete method never reaches labcore's class. Objects made before the cell
don't have the new method: make new ones, as the reader expects. A method that calls `super()` belongs into the first
cell.

`labcore course check-promotion` compares, symbol by symbol and method by method, the syntax trees with the package's.
Comments, docstrings and the order of methods may differ. Nothing else may: annotations, names and constants are the
same.

- Begin the set-up cell with `from __future__ import annotations`, as the modules do: it holds for all cells.
- A marked cell may go on with lines that try the code (`pool = BlockPool(6, 4)`, a result to show, `check(...)`).
- Module constants count: `# labcore: naive.PAD` for `PAD = -1`.
- Each public symbol of a part has one owner. The module's docstring names it: "Built in notebook 02.", or "Built in
  notebooks 04 and 06." A symbol's own docstring doesn't.
- First sketches, to be thrown away, have no marker and a name of their own (`ToyPool`), so that the reader can tell.
- What a notebook can't build readably stays out, by name and reason, in `labcore.course.author.promotion.KEPT_OUT`.


2. Exercises
------------
A text cell, whose first line is `Exercise.headline(number)` word for word, and the code:

    **Exercise 2.2 · copy-on-write · 12 min · ●●○**
    Bo forks: two children share his half-filled block. …
    *Spec:* …

    # labcore: kvcache.blocks.BlockTable.copy_on_write
    class BlockTable(BlockTable):                                   # NEW
        def copy_on_write(self) -> tuple[int, int] | None:
            \"\"\"…\"\"\"
            ### BEGIN SOLUTION
            …
            ### END SOLUTION

and in the next cell

    check("02.copy_on_write", BlockTable)
    BlockTable = or_reference("02.copy_on_write", BlockTable)       # yours; until it passes, this one method is borrowed

`or_reference` lets an unfinished notebook run to its end: it returns its argument if the check passes. Otherwise it
returns a subclass of the learner's class that borrows only the exercise's methods (`Exercise.methods`): the learner's
own as they last passed, which the progress file remembers, or else the reference's. If that doesn't pass the check,
and for a function, it is labcore's own (`Exercise.reference`). Once the learner's methods pass, what was borrowed is
taken out of the classes, without a restart. A check never praises what is borrowed. Leave `or_reference` out where no
later cell needs the object. The reference makes objects of labcore's classes, not of the notebook's: below it,
compare numbers and lists, no classes. `check` and `or_reference` stand in the cell below the solution, which nbgrader
locks and grades by itself.

In the student edition (`labcore student build --out DIR`) the lines between the markers become `raise
NotImplementedError("your turn: 02.copy_on_write")` in a function, and `name = ...` for each name that they define
outside of one. So keep signature and docstring above BEGIN. Each marker has its line to itself.

- A line of a solution with more than 15 characters may stand nowhere else in the student edition: not in another
  cell, not in a hint. The build stops and says where it does.
- Outputs are removed from cells with a solution, a `check`, `or_reference`, `progress`, `hint` or `swap_test`, and from
  cells with the tag `answer`: for a cell that shows what the learner should find out.
- In text, `<details><summary>Solution…</summary>…</details>` is removed; `<summary>Answer` (of a *Predict*) stays.
- A text or code cell with the tag `solution` is a solution as a whole.
- For an nbgrader course, `labcore student build --nbgrader-source --out COURSE/source/labcore` writes what its
  `generate_assignment` starts from; with LABCORE_CHECK=raise its `autograde` gives points by our checks.

The exercise itself is an `Exercise`, or a `BugHunt`, in `labcore/course/exercises/nb02.py`. `labcore.course.learner.exercise`
documents its fields and the functions that checks use: `expect`, `expect_equal`, `expect_raises`,
`expect_attributes`.

- Judge behaviour, never the way: right answers by another road pass. Ask for nothing that the spec doesn't promise.
- One sentence for each mistake, in the learner's terms: what was done, what came of it, what was expected, which hint
  fits.
- No network, no files, no clock, no random numbers without a seed. If the check needs torch, import it inside.
- It runs in its own thread, 20 s at most, and what the learner's code raises is reported with its line: don't catch
  it.

A *bug hunt* starts from a promoted cell with the planted defect (`# labcore: course.exercises.nb02_planted.LeakyPool`: the
tests prove that this code is caught), the request log in which it shows, and a cell where the learner mends it.

The tests want `tests/support/course_solutions/nb02.py`, for each exercise:

    RIGHT = {"02.copy_on_write": [BlockTable, AnotherWay]}                  two at least, written differently
    WRONG = {"02.copy_on_write": [(KeepsOldReference, "refcount 2"), …]}    three at least, with words of their verdict


3. The closing sections
-----------------------
`swap_test(BlockPool, model=llm)` runs the model with the notebook's part and with labcore's, and reports the first
difference. `ledger("reserve", "waste-old")` prints what the notebook found out about those claims; the entries are in
`data/claims.json`, described in `labcore.course.learner.claims`. `claim("reserve").figure` is there to be asserted against,
so that ledger and notebook can't drift apart. `progress("02")` shows this notebook's exercises.


4. Stored outputs
-----------------
`labcore course run 02` executes the notebook in a fresh kernel and tidies its file: run it before each commit.
Progress is kept in memory there and under nbval (LABCORE_PROGRESS=off), so that `progress("02")` after the checks
always reads the same.
"""

from labcore.course.learner.claims import claim, ledger
from labcore.course.learner.engine_diff import swap_test
from labcore.course.learner.verdict import check, hint, or_reference, progress

__all__ = ["check", "claim", "hint", "ledger", "or_reference", "progress", "swap_test"]
