"""The course around the engine: exercises and their checks, promotion, the student edition, the hot-swap proof.

In a notebook:

    from labcore.course import check, finished, hint, progress, prove, ledger

This page is for those who write a notebook. The rules that a test enforces are in `labcore.course.rules`.


1. Promotion: code that lands in the package
--------------------------------------------
A part's code is written once, in the notebook, in cells whose first line names what they define, by its path in labcore:

    # labcore: blocks.BlockPool
    class BlockPool:
        \"\"\"A fixed number of KV blocks.\"\"\"

        def __init__(self, num_blocks: int, block_size: int) -> None:
            ...

A class grows one method at a time by being opened again, in plain Python: a subclass of the same name. The first cell names
the class, each later one the methods that it adds:

    # labcore: blocks.BlockPool.allocate
    class BlockPool(BlockPool):                        # NEW
        def allocate(self, n: int) -> list[int]:
            ...

    # labcore: blocks.BlockPool.fork, .refcount, .is_writable
    class BlockPool(BlockPool):                        # NEW
        ...

    # labcore: blocks.OutOfBlocks, blocks.BlockError
    class OutOfBlocks(RuntimeError): ...

Why a subclass and no decorator: the cell looks as the method looks in the package, it runs twice without harm, `super()` works,
and nothing is ever patched. Objects made before the cell don't have the new method: make new ones, as the reader expects.

`labcore course promote --check` compares, symbol by symbol and attribute by attribute, the syntax trees with the package's.
Comments, docstrings and the order of methods may differ, nothing else may: annotations, names and constants are the same.
- A marked cell may go on with statements that try the code (a line that shows a result, `check(...)`); it defines nothing else.
- Module constants count: `# labcore: naive.PAD` for `PAD = -1`.
- Each public symbol of a part has one owner. Its docstring says so in the package: "Built in notebook 02."
- First sketches that are thrown away have no marker and another name (`ToyPool`), so that the reader can tell them apart.
- What the notebook can't build in a readable way stays out by name and reason, in `labcore.course.promotion.KEPT_OUT`.


2. An exercise
--------------
Markdown (the headline must be `Exercise.headline(number)`, word for word), then the cell:

    **Exercise 2.2 · copy-on-write · 12 min · ●●○**
    Bo forks: two children share his half-filled block. …
    *Spec:* …

    # labcore: blocks.BlockTable.writable_tail
    class BlockTable(BlockTable):                      # NEW
        def writable_tail(self) -> tuple[int, int] | None:
            \"\"\"…\"\"\"
            ### BEGIN SOLUTION
            …
            ### END SOLUTION

    check("02.copy_on_write", BlockTable)
    BlockTable = finished("02.copy_on_write", BlockTable)      # yours once it passes, ours until then

The last line is what lets an unfinished notebook run to its end. `finished` returns its argument if the check passes, and
`labcore.<reference>` if not; it never changes either. Leave it out where no later cell needs the object.

In the student edition the lines between the markers become `raise NotImplementedError("your turn: 02.copy_on_write")`
in a function, and `name = ...` for each name that they define outside of one. So keep signature and docstring above BEGIN.
Markers stand alone on their lines, never nest, and never share a line of more than 15 characters with a cell that students
keep: the build stops and names the cell. Outputs of cells with a solution, a `check`, a `progress` or the tag `answer` are
removed. In markdown, `<details><summary>Solution…</summary>…</details>` is removed, `<summary>Answer` (of a *Predict*) is kept.

The exercise itself is an `Exercise` (or a `BugHunt`) in `labcore/course/specs/nbNN.py`; see `labcore.course.exercises` for its
fields and for `expect`, `expect_equal`, `expect_raises`, `expect_attributes`. In writing a check:
- Judge behaviour, never the way: right answers by another road pass. Use only what the spec promises.
- One sentence a mistake, in the learner's terms: what was done, what came, what was expected, and the hint that fits.
- Import torch, if need be, inside the check. No network, no files, no clock, no unseeded randomness.
- It runs in its own thread under 20 s; whatever the learner's code raises is reported with its line. Don't catch it.

A *bug hunt* starts from a cell with the planted defect (marked, e.g. `# labcore: course.specs.nb02.LeakyPool`, so that the tests
know the very same code), its failing request log, and a cell where the learner mends it: a subclass or a fixed function.

Tests ask for `tests/course_solutions/nbNN.py` with, for each exercise id,

    RIGHT = {"02.copy_on_write": [BlockTable, AnotherWay]}                        # at least two, written differently
    WRONG = {"02.copy_on_write": [(KeepsOldReference, "still has refcount 2"), …]}  # at least three, with words of the verdict

3. The closing sections
-----------------------
`prove(BlockPool)` runs the real model with the notebook's part and with ours and says where they part, if they do.
`ledger("reserve", "waste-old")` prints the claims that the notebook has measured (`data/claims.json`, see `labcore.course.claims`);
`claim("reserve").figure` is there to be asserted against. `progress("02")` shows this notebook's exercises.


4. Stored outputs
-----------------
`labcore course run 02` executes the notebook in a fresh kernel and cleans it up: run it before each commit. Progress is kept
in memory there and under nbval (LABCORE_PROGRESS=off), so `progress("02")` after the checks reads the same in every run.
"""

from labcore.course.session import check, finished, hint, progress

__all__ = ["check", "finished", "hint", "progress"]
