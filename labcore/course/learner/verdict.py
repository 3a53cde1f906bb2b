"""`check`, `or_reference`, `hint` and `progress`: the functions that a notebook calls for its exercises.

They share one `CheckSession` per kernel: what was checked last, which hints were given. A verdict is two lines of text,
the same in every run, so that nbval can compare them:

    02.copy_on_write   not yet — after fork(), child 1 wrote and child 2's token 5 changed.
                       expected block 3 to be copied before the write; it has refcount 2.   hint(1) for a nudge
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from labcore.course.learner.exercise import (
    Exercise,
    Mismatch,
    find_exercise,
    notebook_exercises,
    notebooks_with_exercises,
    resolve,
    stub_of,
)
from labcore.course.learner.locate_error import locate_error
from labcore.course.learner.progress import Progress, load_progress, progress_path, progress_table
from labcore.course.learner.stand_in import (
    borrowed_methods,
    definer,
    function_from,
    is_labcores,
    methods_from,
    namespace_of,
    reference_methods,
    return_borrowed,
    sources_of,
    stand_in,
)
from labcore.course.learner.text import sentence, shorten, wrapped
from labcore.course.learner.timeout import run_with_timeout, same_random_state

TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Verdict:
    """The result of a check: `done`, or what was observed, what was expected, and which hint fits."""

    exercise_id: str
    done: bool
    what: str
    expected: str = ""
    hint: int = 0  # 0: no hint fits

    def __str__(self) -> str:
        came = f"{'done' if self.done else 'not yet'} — {sentence(self.what)}"
        nudge = f"hint({self.hint}) for a nudge" if self.hint else ""
        if not self.expected:
            return wrapped(self.exercise_id, came, nudge)
        blank = " " * len(self.exercise_id)
        return wrapped(self.exercise_id, came) + "\n" + wrapped(blank, f"expected {sentence(self.expected)}", nudge)


def judge(exercise: Exercise, obj: Any, timeout: float = TIMEOUT_SECONDS) -> Verdict:
    """Run one check on one object within the timeout. Exceptions of the object are reported, not raised."""
    if obj is ...:
        return Verdict(exercise.id, False, "nothing is written here yet", hint=1)
    with same_random_state():
        outcome = run_with_timeout(lambda: exercise.check(obj), timeout)
    error = outcome.error
    if outcome.timed_out:
        location = f", {outcome.location}" if outcome.location else ""
        return Verdict(exercise.id, False, f"it was still running after {timeout:g} s{location}", "it to come to an end", 1)
    if error is None:
        return Verdict(exercise.id, True, exercise.passed)
    if missing := stub_of(error):
        what = "nothing is written here yet" if missing in ("?", exercise.id) else f"{missing} comes first"
        return Verdict(exercise.id, False, what, hint=1)
    if isinstance(error, Mismatch):
        return Verdict(exercise.id, False, error.what, error.expected, min(error.hint, len(exercise.hints)))
    location, said = locate_error(error), shorten(str(error))
    message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    what = f"it raised {message} {location}" if location else f"what it gave can't be used: {message}"
    return Verdict(exercise.id, False, what.rstrip(), hint=1)


def borrowed_verdict(exercise: Exercise, obj: Any) -> Verdict | None:
    """A verdict of "not yet" for what was borrowed after a failed check, or is labcore's own; None for the learner's."""
    borrowed = [name for name in exercise.methods if name in borrowed_methods(obj)]
    if borrowed:
        names = " and ".join(borrowed)
        return Verdict(exercise.id, False, f"{names} is borrowed here, until yours passes", "your own, from the cell above", 1)
    if is_reference(exercise, obj):
        return Verdict(exercise.id, False, "this is labcore's own", "yours, from the cell above", 1)
    return None


def is_reference(exercise: Exercise, obj: Any) -> bool:
    """Whether what the exercise asks for is labcore's reference, or inherited from a class of labcore's."""
    if isinstance(obj, type) and exercise.methods:
        definers = [definer(obj, name) for name in exercise.methods]
        return all(each is not None and is_labcores(each) for each in definers)
    return callable(obj) and obj is resolve(exercise.reference)


@dataclass
class CheckSession:
    """State of the checks in one kernel. `tell` receives the text (print by default)."""

    tell: Callable[[str], None] = print
    timeout: float = TIMEOUT_SECONDS
    last: tuple[str, Any, Verdict | None] = ("", None, None)  # what was checked last: id, object, verdict
    hints_given: dict[str, int] = field(default_factory=dict)
    unsaved: dict[str, str] = field(default_factory=dict)  # progress that no file holds
    kept: dict[str, dict[str, str]] = field(default_factory=dict)  # sources that passed in this kernel

    def check(self, exercise_id: str, obj: Any) -> None:
        """Say in one or two lines whether `obj` does what exercise `exercise_id` asks. Never raises.

        With LABCORE_CHECK=raise (for autograders) a verdict of "not yet" is raised as an AssertionError instead.
        """
        exercise = self._find(exercise_id)
        if exercise is None:
            return
        return_borrowed(obj, exercise.methods)
        verdict = borrowed_verdict(exercise, obj) or judge(exercise, obj, self.timeout)
        self.last = (exercise_id, obj, verdict)
        progress = self._progress()
        progress.record(exercise_id, verdict.done, sources_of(obj, exercise.methods) if verdict.done else None)
        if not verdict.done and os.environ.get("LABCORE_CHECK") == "raise":
            raise AssertionError(str(verdict))
        self.tell("\n".join(text for text in (str(verdict), progress.note) if text))

    def or_reference(self, exercise_id: str, obj: Any) -> Any:
        """`obj` if its check passes; otherwise what the notebook can go on with, so that later cells work either way.

        That is the learner's own class with only the exercise's methods borrowed; or their function as it last passed; or,
        if these don't pass the check, labcore's reference.
        """
        exercise = self._find(exercise_id)
        if exercise is None:
            return obj
        return_borrowed(obj, exercise.methods)
        if borrowed_verdict(exercise, obj):
            return obj
        last_id, last_obj, verdict = self.last
        if verdict is None or last_id != exercise_id or last_obj is not obj:
            verdict = judge(exercise, obj, self.timeout)
        if verdict.done:
            return obj
        for substitute, said in self._substitutes(exercise, obj):
            if judge(exercise, substitute, self.timeout).done:
                self.tell(wrapped(exercise_id, f"not done yet: the notebook goes on with {said}."))
                return substitute
        self.tell(f"{exercise_id}   not done yet: the notebook goes on with labcore.{exercise.reference}.")
        return resolve(exercise.reference)

    def _substitutes(self, exercise: Exercise, obj: Any) -> Iterator[tuple[Any, str]]:
        """What may stand in for `obj`, and how it is said: the learner's last passing version first."""
        kept, is_class = self._progress().kept.get(exercise.id, {}), isinstance(obj, type) and bool(exercise.methods)
        names = " and ".join(exercise.methods)
        if kept:
            with suppress(Exception):  # a source of another version of the notebook
                if is_class:
                    yield stand_in(obj, methods_from(kept, obj, namespace_of(obj))), f"your {names} as it last passed"
                elif len(kept) == 1:
                    ((name, source),) = kept.items()
                    yield function_from(source, name, namespace_of(obj)), f"your {name} as it last passed"
        if is_class:
            borrowed = reference_methods(resolve(exercise.reference), exercise.methods)
            yield stand_in(obj, borrowed), f"your {obj.__name__}, and borrows labcore's {names}"

    def hint(self, which: str | int | None = None, level: int | None = None) -> None:
        """The next hint for an exercise: `hint("02.allocate")`; or for the one checked last: `hint()`, `hint(2)`."""
        if isinstance(which, int):
            which, level = None, which
        exercise_id = which or self.last[0]
        if not exercise_id:
            self.tell('which exercise? Name it, or check something first: hint("02.allocate").')
            return
        exercise = self._find(exercise_id)
        if exercise is None:
            return
        level = level or max(self.hints_given.get(exercise.id, 0) + 1, self._named_hint(exercise))
        level = max(1, min(level, len(exercise.hints)))
        self.hints_given[exercise.id] = level
        self.tell(wrapped(exercise.id, f"hint {level} of {len(exercise.hints)} — {exercise.hints[level - 1]}"))

    def _named_hint(self, exercise: Exercise) -> int:
        """The hint that the last verdict named, if it was this exercise's."""
        last_id, _, verdict = self.last
        return verdict.hint if verdict is not None and last_id == exercise.id else 0

    def progress(self, notebook: str | int | None = None) -> None:
        """Which exercises are done, in one notebook ("02") or in all, how many minutes are left, what comes next."""
        number = None if notebook is None else str(notebook).zfill(2)
        try:
            self.tell(progress_table(self._progress(), number))
        except Exception as error:  # a spec module that doesn't load
            self.tell(f"progress can't be shown ({type(error).__name__}: {error}).")

    def _progress(self) -> Progress:
        return load_progress(progress_path(), self.unsaved, self.kept)

    def _find(self, exercise_id: str) -> Exercise | None:
        try:
            exercise = find_exercise(exercise_id)
            known = [e.id for e in notebook_exercises(str(exercise_id)[:2])]
        except Exception as error:  # a spec module that doesn't load
            self.tell(f"{exercise_id}   can't be checked: its exercises don't load ({type(error).__name__}: {error}).")
            return None
        if exercise is None:
            known = known or [f"{number}.…" for number in notebooks_with_exercises()]
            self.tell(f"there is no exercise {exercise_id!r} — there are: {', '.join(known) or 'none at all'}.")
        return exercise


_session = CheckSession()
check, or_reference, hint, progress = _session.check, _session.or_reference, _session.hint, _session.progress
