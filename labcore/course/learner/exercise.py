"""Exercises: the format of a spec module, and the functions that checks are written with.

One module per notebook, `labcore/course/exercises/nb02.py` for notebook 02, with a tuple `EXERCISES`. A check is a
function of the learner's object. It calls `expect` and its variants, which end it at the first failure; the learner
reads the sentence given there:

    def check_allocate(BlockPool):
        pool = BlockPool(num_blocks=4, block_size=4)
        expect_equal(len(pool.allocate(3)), 3, "allocate(3) was asked of a pool of 4")
        expect_equal(pool.num_free, 1, "3 of 4 blocks were taken", hint=2)

    EXERCISES = (
        Exercise(
            "02.allocate",
            title="allocate",
            minutes=8,
            difficulty=1,
            spec="allocate(n) takes n blocks …",
            check=check_allocate,
            passed="takes blocks from the head of the free list, all or nothing",
            hints=("What does the pool know before you take the first block?", "Ask `num_free` first."),
            reference="kvcache.blocks.BlockPool",
        ),
    )
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labcore.course import exercises as specs
from labcore.course.learner.text import show

YOUR_TURN = "your turn: "  # what the stub of an unwritten function raises, before its exercise's id
EXERCISE_ID = re.compile(r"(\d\d)\.([a-z][a-z0-9_]*)")


class Mismatch(Exception):
    """A check failed. Raised by `expect`, reported by `check`."""

    def __init__(self, what: str, expected: str = "", hint: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.hint = hint


@dataclass(frozen=True)
class Exercise:
    """One exercise of one notebook.

    id:          notebook and name, "02.allocate".
    title:       as in the notebook's headline.
    minutes:     what a learner should plan.
    difficulty:  1 to 3, drawn as ●○○ to ●●●.
    spec:        what the learner's object has to do, in full; the check asks for nothing else.
    check:       function of the learner's object; returns when all is well, calls `expect` to object.
    passed:      what a passing object has been seen to do; the check's one line of praise.
    hints:       from a nudge to nearly the answer, two at least. No line of the solution stands in one.
    reference:   our own object, as a path inside labcore ("kvcache.blocks.BlockPool"); `or_reference` borrows from it.
    methods:     the methods that the learner writes, if the object is a class; these are borrowed until theirs pass.
    """

    id: str
    title: str
    minutes: int
    difficulty: int
    spec: str
    check: Callable[[Any], None]
    passed: str
    hints: tuple[str, ...]
    reference: str
    methods: tuple[str, ...] = field(default=(), kw_only=True)

    kind = "build"

    def __post_init__(self) -> None:
        if not EXERCISE_ID.fullmatch(self.id):
            raise ValueError(
                f"exercise id is {self.id!r}; it must be a notebook's number, a dot and a name: 02.allocate."
            )
        if self.difficulty not in (1, 2, 3):
            raise ValueError(f"{self.id}: difficulty is {self.difficulty!r}; it must be 1, 2 or 3.")
        if self.minutes < 1:
            raise ValueError(f"{self.id}: minutes is {self.minutes!r}; it must be at least 1.")
        if isinstance(self.hints, str) or len(self.hints) < 2:
            raise ValueError(
                f"{self.id}: hints must be a tuple of two or more sentences, from a nudge to nearly the answer."
            )

    @property
    def notebook(self) -> str:
        return self.id[:2]

    @property
    def circles(self) -> str:
        """The difficulty as it is drawn: ●●○."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)

    def headline(self, number: int) -> str:
        """The line that opens the exercise in its notebook; `number` is its place there, from 1."""
        return f"**Exercise {int(self.notebook)}.{number} · {self.title} · {self.minutes} min · {self.circles}**"


@dataclass(frozen=True)
class BugHunt(Exercise):
    """An exercise that starts from code with a planted defect: the learner finds and mends it.

    planted:  the defective object, as a path inside labcore ("course.exercises.nb02_planted.LeakyPool"). The notebook shows its
              code in a promoted cell, so that what the learner reads is what the tests prove to be caught.
    seen_in:  where a real engine had this defect ("vllm-project/vllm#1584").
    """

    planted: str
    seen_in: str

    kind = "bug hunt"


def expect(ok: bool, what: str, expected: str = "", hint: int = 1) -> None:
    """Go on if `ok`; otherwise end the check: `what` came, `expected` should have.

    what:      what was done and what came of it: "after fork(), child 1 wrote and child 2's token 5 changed".
    expected:  "block 3 to be copied before the write; it has refcount 2".
    hint:      which of the exercise's hints fits this mistake, from 1.
    """
    if not ok:
        raise Mismatch(what, expected, hint)


def expect_equal(got: Any, expected: Any, what: str, hint: int = 1) -> None:
    """Go on if `got == expected`. `what` says what was done: "allocate(3) was asked of a pool of 4"."""
    if not _equal(got, expected):
        raise Mismatch(what, f"{show(expected)}, got {show(got)}", hint)


def expect_raises(error: type[BaseException], call: Callable[[], Any], what: str, hint: int = 1) -> None:
    """Go on if `call()` raises `error` (any other error is the learner's, and is reported as such)."""
    try:
        got = call()
    except error as raised:
        if stub_of(raised):
            raise
        return
    raise Mismatch(what, f"{error.__name__} to be raised, got {show(got)}", hint)


def expect_attributes(obj: Any, *names: str) -> None:
    """Go on if `obj` has every one of the attributes: the first lines of a check of a class."""
    for name in names:
        if not hasattr(obj, name):
            raise Mismatch(f"{getattr(obj, '__name__', 'your object')} has no `{name}` yet", "", 1)


def stub_of(error: BaseException | None) -> str:
    """The exercise whose stub an error comes from, directly or as a cause: "02.free"; "?" for a stub without a name."""
    while error is not None:
        if isinstance(error, NotImplementedError) and not str(error):
            return "?"
        if isinstance(error, NotImplementedError) and str(error).startswith(YOUR_TURN):
            return str(error)[len(YOUR_TURN) :]
        error = error.__cause__ or error.__context__
    return ""


def find_exercise(exercise_id: str) -> Exercise | None:
    """The exercise with this id, or None."""
    return next((e for e in notebook_exercises(str(exercise_id)[:2]) if e.id == exercise_id), None)


def notebook_exercises(notebook: str) -> tuple[Exercise, ...]:
    """The exercises of one notebook ("02"), in its order; none if it has no spec module."""
    if notebook not in notebooks_with_exercises():
        return ()
    return importlib.import_module(f"{specs.__name__}.nb{notebook}").EXERCISES


def notebooks_with_exercises() -> list[str]:
    """Numbers of the notebooks that have exercises, in order: ["01", "02"]."""
    names = (module.name for module in pkgutil.iter_modules(specs.__path__))
    return sorted(name[2:] for name in names if re.fullmatch(r"nb\d\d", name))


def resolve(path: str) -> Any:
    """The object at a path inside labcore: "kvcache.blocks.BlockPool" is `labcore.kvcache.blocks.BlockPool`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"labcore.{module}"), name)


def _equal(got: Any, expected: Any) -> bool:
    """Equality that also serves arrays and tensors, where `==` gives an array."""
    same = got == expected
    if hasattr(same, "all"):
        return getattr(got, "shape", None) == getattr(expected, "shape", None) and bool(same.all())
    return bool(same)
