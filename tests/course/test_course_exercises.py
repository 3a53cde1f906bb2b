"""Every exercise of the course: its check knows right from wrong, says so in words that fit, and gives nothing away."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.util import find_spec

import pytest

from labcore.course.learner.exercise import BugHunt, notebook_exercises, notebooks_with_exercises, resolve
from labcore.course.learner.verdict import judge

EXERCISES = [exercise for number in notebooks_with_exercises() for exercise in notebook_exercises(number)]


def solutions(exercise, kind):
    """RIGHT or WRONG of an exercise, from tests/course_solutions/nbNN.py."""
    name = f"course_solutions.nb{exercise.notebook}"
    assert find_spec(name), f"tests/course_solutions/nb{exercise.notebook}.py is missing"
    return getattr(import_module(name), kind).get(exercise.id, [])


def cases(kind):
    """One case per solution; one that fails plainly where a module or an entry is missing."""
    for exercise in EXERCISES:
        if find_spec(f"course_solutions.nb{exercise.notebook}"):
            for number, solution in enumerate(solutions(exercise, kind), 1):
                yield pytest.param(exercise, solution, id=f"{exercise.id}-{number}")


each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)


@pytest.mark.parametrize(("exercise", "solution"), list(cases("RIGHT")))
def test_a_right_solution_passes_by_whatever_road(exercise, solution):
    verdict = judge(exercise, solution)
    assert verdict.done, str(verdict)


@pytest.mark.parametrize(("exercise", "solution"), list(cases("WRONG")))
def test_a_wrong_solution_fails_with_a_sentence_that_fits(exercise, solution):
    attempt, words = solution
    verdict = judge(exercise, attempt, timeout=2)
    assert not verdict.done
    assert words and words in " ".join(str(verdict).split())
    assert str(judge(exercise, attempt, timeout=2)) == str(verdict)  # the same in every run


@each_exercise
def test_there_are_two_right_solutions_and_three_wrong_ones(exercise):
    right, wrong = solutions(exercise, "RIGHT"), solutions(exercise, "WRONG")
    assert len(right) >= 2 and len(wrong) >= 3
    assert len({_code(solution) for solution in right}) == len(right)
    assert len({_code(attempt) for attempt, _ in wrong}) == len(wrong)


@each_exercise
def test_the_reference_passes_its_own_check(exercise):
    assert judge(exercise, resolve(exercise.reference)).done


@each_exercise
def test_nothing_written_and_nonsense_are_verdicts_too(exercise):
    assert "nothing is written here yet" in str(judge(exercise, ...))
    for nonsense in (None, "text", object(), type("Empty", (), {})):
        assert not judge(exercise, nonsense, timeout=2).done


@each_exercise
def test_a_verdict_and_a_hint_fit_the_page(exercise):
    assert exercise.spec and exercise.passed and exercise.title
    assert all(hint.strip() for hint in exercise.hints)
    assert len(set(exercise.hints)) == len(exercise.hints)
    assert max(map(len, exercise.hints)) < 400


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if isinstance(e, BugHunt)], ids=lambda exercise: exercise.id)
def test_the_planted_defect_is_caught(exercise):
    verdict = judge(exercise, resolve(exercise.planted), timeout=2)
    assert not verdict.done
    assert exercise.seen_in


def test_ids_are_unique_and_stand_in_the_module_of_their_notebook():
    ids = [exercise.id for exercise in EXERCISES]
    assert len(set(ids)) == len(ids)
    for number in notebooks_with_exercises():
        assert {exercise.notebook for exercise in notebook_exercises(number)} == {number}


def _code(solution):
    """What makes two solutions different: the code of a class or function, or the value."""
    try:
        return ast.dump(ast.parse(inspect.cleandoc(inspect.getsource(solution))))
    except (TypeError, OSError, SyntaxError):
        return repr(solution)
