"""What a learner reads: verdicts, hints and progress, and that no code of theirs can hurt the course."""

from __future__ import annotations

import _thread
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import mini_course
import pytest

import labcore
from labcore.course import exercises as specs
from labcore.course.learner.exercise import Exercise, expect_equal, expect_raises, find_exercise
from labcore.course.learner.progress import load_progress, progress_path
from labcore.course.learner.text import show
from labcore.course.learner.timeout import run_with_timeout
from labcore.course.learner.verdict import CheckSession, judge
from labcore.kvcache.blocks import BlockPool


@pytest.fixture(autouse=True)
def mini_exercises(monkeypatch):
    monkeypatch.setattr(specs, "__path__", [*specs.__path__, str(mini_course.HERE)])


@pytest.fixture
def told():
    return []


@pytest.fixture
def session(told):
    return CheckSession(tell=told.append, timeout=0.3)


class Allocates(BlockPool):
    def allocate(self, n):
        return super().allocate(n)


class TakesTooMany(BlockPool):
    def allocate(self, n):
        return super().allocate(n + 1)


class ForgetsToCount(BlockPool):
    def allocate(self, n):
        return list(range(n))


class Unwritten(BlockPool):
    def allocate(self, n):
        raise NotImplementedError("your turn: 77.allocate")


class RefusedByAnother(BlockPool):
    def allocate(self, n):
        try:
            raise NotImplementedError("your turn: 77.allocate")
        except NotImplementedError as error:
            raise ValueError("refused") from error


class NbgradersStub(BlockPool):
    def allocate(self, n):
        raise NotImplementedError()


class NeedsAnother(BlockPool):
    def allocate(self, n):
        raise NotImplementedError("your turn: 77.leak")


class Stumbles(BlockPool):
    def allocate(self, n):
        return [].pop()


class GivesNothing(BlockPool):
    def allocate(self, n):
        return None


class LeavesTheKernel(BlockPool):
    def allocate(self, n):
        sys.exit("bye")


class LoopsForEver(BlockPool):
    def allocate(self, n):
        while True:
            pass


class SwallowsEverything(BlockPool):
    def allocate(self, n):
        while True:
            try:
                self.num_free += 0
            except BaseException:
                pass


class Sleeps(BlockPool):
    def allocate(self, n):
        threading.Event().wait(60)


class Recurses(BlockPool):
    def allocate(self, n):
        return self.allocate(n)


class HasAHostileRepr:
    def __repr__(self):
        raise RuntimeError("no")


def test_a_right_answer_is_praised_for_what_it_was_seen_to_do(session, told):
    session.check("77.allocate", Allocates)
    assert told == ["77.allocate   done — takes n blocks, all or nothing."]


def test_a_wrong_answer_hears_what_came_what_was_expected_and_which_hint_fits(session, told):
    session.check("77.allocate", ForgetsToCount)
    assert told == [
        "77.allocate   not yet — 3 of 4 blocks were taken.\n              expected 1, got 4.   hint(2) for a nudge"
    ]


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (..., "not yet — nothing is written here yet."),
        (Unwritten, "not yet — nothing is written here yet."),
        (RefusedByAnother, "not yet — nothing is written here yet."),
        (NbgradersStub, "not yet — nothing is written here yet."),
        (NeedsAnother, "not yet — 77.leak comes first."),
        (TakesTooMany, "allocate(3) was asked of a pool of 4.\n              expected 3, got 4."),
        (Stumbles, "it raised IndexError: pop from empty list in allocate, at `return [].pop()`."),
        (GivesNothing, "object of type 'NoneType' has no len()"),
        (LeavesTheKernel, "it raised SystemExit: bye in allocate"),
        (Recurses, "RecursionError: maximum recursion depth exceeded"),
        (None, "your object has no `allocate` yet."),
        (7, "your object has no `allocate` yet."),
        (HasAHostileRepr(), "your object has no `allocate` yet."),
    ],
)
def test_whatever_the_learner_passes_the_answer_is_a_verdict(session, told, attempt, sentence):
    session.check("77.allocate", attempt)
    assert "not yet — " in told[0]
    assert " ".join(sentence.split()) in " ".join(told[0].split())


@pytest.mark.parametrize(
    ("attempt", "line"),
    [(LoopsForEver, ""), (SwallowsEverything, ""), (Sleeps, ", at `threading.Event().wait(60)`")],
)
def test_code_that_never_ends_is_stopped_at_the_limit(session, told, attempt, line):
    started = time.monotonic()
    session.check("77.allocate", attempt)
    assert time.monotonic() - started < 5
    assert f"it was still running after 0.3 s, in allocate{line}" in told[0].replace("\n             ", "")
    assert "expected it to come to an end." in told[0]


@pytest.mark.parametrize("attempt", [LoopsForEver, SwallowsEverything])
def test_a_stopped_loop_leaves_no_thread_behind(attempt):
    before = threading.active_count()
    outcome = run_with_timeout(lambda: attempt(4, 4).allocate(1), 0.05)
    assert outcome.timed_out
    assert threading.active_count() == before


def test_a_stopped_thread_says_nothing_on_stderr(capfd):
    run_with_timeout(lambda: LoopsForEver(4, 4).allocate(1), 0.05)
    assert capfd.readouterr().err == ""


def test_a_learners_file_beside_the_package_is_the_learners(session, told):
    """Its path begins as the package's does: labcore_notes.py, beside labcore/."""
    source = "class Noted:\n  def __init__(self, *_):\n    self.allocate()\n  def allocate(self, n=0):\n    return [][n]"
    names: dict = {}
    exec(compile(source, f"{Path(labcore.__file__).parent}_notes.py", "exec"), names)
    session.check("77.allocate", names["Noted"])
    assert "it raised IndexError: list index out of range in allocate" in told[0]


def test_an_interrupt_of_the_learner_stops_the_check_and_is_theirs_to_see():
    def loops_until_somebody_presses_ctrl_c():
        _thread.interrupt_main()
        LoopsForEver(4, 4).allocate(1)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_with_timeout(loops_until_somebody_presses_ctrl_c, 10)
    assert threading.active_count() == before


def test_a_check_leaves_the_random_numbers_as_they_were(session):
    def draws(_):
        random.random()

    exercise = Exercise("77.draw", "x", 1, 1, "x", draws, "x", ("a", "b"), "kvcache.blocks.BlockPool")
    random.seed(1)
    expected = random.random()
    random.seed(1)
    judge(exercise, None)
    assert random.random() == expected


def test_a_verdict_reads_the_same_in_every_run():
    assert show({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert show(object()) == "<object object at 0x…>"
    assert show(HasAHostileRepr()) == "a HasAHostileRepr whose repr raises RuntimeError"
    assert len(show("x" * 1000)) == 80


def test_arrays_and_tensors_are_compared_by_all_their_elements():
    numpy = pytest.importorskip("numpy")
    expect_equal(numpy.arange(3), numpy.arange(3), "x")
    with pytest.raises(Exception, match="x"):
        expect_equal(numpy.arange(3), numpy.array([0, 1, 3]), "x")
    with pytest.raises(Exception, match="x"):
        expect_equal(numpy.ones((1, 3)), numpy.ones(3), "x")


def test_an_unknown_exercise_is_named_together_with_those_there_are(session, told):
    session.check("77.alocate", BlockPool)
    assert told == ["there is no exercise '77.alocate' — there are: 77.allocate, 77.total, 77.leak."]
    session.check(None, BlockPool)
    session.check(3.5, BlockPool)
    assert all(line.startswith("there is no exercise") for line in told)


def test_exercises_that_do_not_load_are_reported_not_raised(session, told, monkeypatch, tmp_path):
    (tmp_path / "nb78.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(specs, "__path__", [str(tmp_path)])
    session.check("78.x", 1)
    session.progress()
    assert "its exercises don't load (ModuleNotFoundError" in told[0]
    assert "progress can't be shown" in told[1]


def test_or_reference_gives_back_a_passing_object_in_silence(session, told):
    assert session.or_reference("77.total", 6) == 6
    assert told == []


def test_or_reference_goes_on_with_the_reference_and_says_so(session, told):
    assert session.or_reference("77.allocate", ...) is BlockPool
    assert session.or_reference("77.total", ...) == 6
    assert told[0] == "77.allocate   not done yet: the notebook goes on with labcore.kvcache.blocks.BlockPool."


def test_or_reference_does_not_wait_a_second_time_for_the_object_that_was_just_checked(told):
    session = CheckSession(tell=told.append, timeout=0.8)
    session.check("77.allocate", Sleeps)
    started = time.monotonic()
    session.or_reference("77.allocate", Sleeps)
    assert time.monotonic() - started < 0.8, "the limit was waited for once more"


def test_hints_come_one_after_the_other_and_the_last_one_stays(session, told):
    for _ in range(3):
        session.hint("77.allocate")
    assert told[0] == "77.allocate   hint 1 of 2 — Where do free blocks wait?"
    assert told[1] == told[2] == "77.allocate   hint 2 of 2 — Count them before you take the first."


def test_a_hint_by_number_belongs_to_the_exercise_checked_last(session, told):
    session.hint(1)
    session.check("77.total", 5)
    session.hint(2)
    session.hint(99)
    assert told[0].startswith("which exercise?")
    assert told[2] == told[3] == "77.total   hint 2 of 2 — One plus two is three."


def test_an_autograder_gets_an_exception_instead_of_a_verdict(session, monkeypatch):
    monkeypatch.setenv("LABCORE_CHECK", "raise")
    session.check("77.total", 6)
    with pytest.raises(AssertionError, match="77.total   not yet"):
        session.check("77.total", 5)


class TestProgress:
    @pytest.fixture(autouse=True)
    def learners_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("LABCORE_PROGRESS")
        monkeypatch.chdir(tmp_path)

    def test_it_shows_what_is_done_what_is_left_and_what_comes_next(self, session, told):
        session.check("77.allocate", Allocates)
        session.check("77.total", 5)
        session.progress("77")
        assert told[-1].splitlines() == [
            "77                         1 of 3 exercises done, about 12 minutes left",
            "  done     77.allocate                8 min  ●○○  allocate",
            "  not yet  77.total                   2 min  ●○○  a sum",
            "  open     77.leak                   10 min  ●●○  the leak",
            "next: 77.total, a sum (2 min)",
        ]

    def test_it_survives_the_kernel_in_a_file_in_the_learners_folder(self, session, told, tmp_path):
        session.check("77.total", 6)
        CheckSession(tell=told.append).progress(77)
        assert json.loads((tmp_path / ".labcore_progress.json").read_text()) == {
            "format": 1,
            "exercises": {"77.total": "done"},
            "kept": {},
        }
        assert "1 of 3 exercises done" in told[-1]

    def test_a_solution_that_broke_since_is_no_longer_done(self, session):
        session.check("77.total", 6)
        session.check("77.total", 7)
        assert not load_progress(progress_path()).is_done("77.total")

    @pytest.mark.parametrize(
        "content",
        ["", "{", "[]", "7", '{"format": 9, "exercises": {}}', '{"format": 1, "exercises": {"77.total": 3}}', "\xff"]
        + ["[" * 100_000],
        ids=["empty", "torn", "list", "number", "newer", "odd state", "no text", "deep"],
    )
    def test_progress_that_cannot_be_read_is_set_aside_with_a_sentence(self, session, told, content, tmp_path):
        content = content.encode("latin-1")
        (tmp_path / ".labcore_progress.json").write_bytes(content)
        (tmp_path / ".labcore_progress.unreadable-1.json").write_text("an older one")
        session.progress("77")
        assert "can't be read: the next check sets it aside" in told[0]
        assert (tmp_path / ".labcore_progress.json").read_bytes() == content
        session.check("77.total", 6)
        assert told[1].startswith("77.total   done")
        assert "could not be read: it is now .labcore_progress.unreadable-2.json" in told[1]
        assert (tmp_path / ".labcore_progress.unreadable-2.json").read_bytes() == content
        assert (tmp_path / ".labcore_progress.unreadable-1.json").read_text() == "an older one"
        session.check("77.total", 6)
        assert "afresh" not in told[2]

    def test_progress_at_a_place_that_is_a_folder_leaves_it_alone(self, session, told, monkeypatch, tmp_path):
        (tmp_path / "photos").mkdir()
        monkeypatch.setenv("LABCORE_PROGRESS", str(tmp_path / "photos"))
        session.check("77.total", 6)
        assert "progress can't be saved here (Is a directory)" in told[0]
        assert os.listdir(tmp_path) == ["photos"]

    def test_progress_of_two_kernels_is_kept_together(self, session, told, tmp_path):
        other = CheckSession(tell=told.append)
        earlier = load_progress(progress_path())
        other.check("77.allocate", Allocates)
        earlier.record("77.total", True)  # it had read the file before the other one wrote
        other.check("77.total", 5)
        session.check("77.leak", 0)
        assert load_progress(progress_path()).states == {
            "77.allocate": "done",
            "77.total": "not yet",
            "77.leak": "not yet",
        }

    def test_progress_written_by_many_at_once_loses_no_verdict(self, tmp_path):
        def record(number: int) -> None:
            load_progress(tmp_path / "p.json").record(f"77.e{number}", True)

        threads = [threading.Thread(target=record, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(load_progress(tmp_path / "p.json").states) == 12
        assert os.listdir(tmp_path) == ["p.json"]

    def test_progress_behind_a_link_is_written_where_the_link_leads(self, session, monkeypatch, tmp_path):
        (tmp_path / "cloud").mkdir()
        (tmp_path / ".labcore_progress.json").symlink_to(tmp_path / "cloud/mine.json")
        session.check("77.total", 6)
        assert (tmp_path / ".labcore_progress.json").is_symlink()
        assert load_progress(tmp_path / "cloud/mine.json").is_done("77.total")

    def test_progress_takes_a_tilde_for_the_home_folder(self, session, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
        monkeypatch.setenv("LABCORE_PROGRESS", "~/p.json")
        (tmp_path / "home").mkdir()
        session.check("77.total", 6)
        assert load_progress(tmp_path / "home/p.json").is_done("77.total")
        assert os.listdir(tmp_path) == ["home"]

    def test_a_folder_that_cannot_be_written_to_does_not_fail_a_check(self, session, told, monkeypatch, tmp_path):
        monkeypatch.setenv("LABCORE_PROGRESS", str(tmp_path / "missing" / "progress.json"))
        session.check("77.total", 6)
        assert "done — 6 tokens in all." in told[0]
        assert "progress can't be saved here" in told[0]
        session.check("77.allocate", Allocates)
        session.progress("77")
        assert "2 of 3 exercises done" in told[2], "it lasts as long as this kernel, as the note says"
        (tmp_path / "missing").mkdir()
        session.check("77.total", 6)
        assert "can't be saved" not in told[3]
        assert load_progress(progress_path()).states == {"77.total": "done", "77.allocate": "done"}

    def test_no_half_written_file_is_left_when_the_disk_fails(self, session, monkeypatch, tmp_path):
        session.check("77.allocate", Allocates)

        def fails(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fails)
        session.check("77.total", 6)
        monkeypatch.undo()
        assert [p.name for p in Path(tmp_path).iterdir()] == [".labcore_progress.json"]
        assert load_progress(tmp_path / ".labcore_progress.json").states == {"77.allocate": "done"}


def test_progress_stays_in_memory_where_the_course_checks_itself(session, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session.check("77.total", 6)
    session.progress("77")
    assert "1 of 3 exercises done" in told[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("id", "2.allocate", "a dot and a name"),
        ("difficulty", 4, "1, 2 or 3"),
        ("minutes", 0, "at least 1"),
        ("hints", ("x",), "two or more"),
    ],
)
def test_an_exercise_that_lacks_something_is_refused(field, value, said):
    fields = vars(find_exercise("77.allocate")) | {field: value}
    with pytest.raises(ValueError, match=said):
        Exercise(**fields)


def test_a_stub_is_no_answer_where_an_error_is_asked_for():
    def stub():
        raise NotImplementedError("your turn: 77.allocate")

    def real():
        raise RuntimeError("none left")

    expect_raises(RuntimeError, real, "x")
    with pytest.raises(NotImplementedError, match="your turn"):
        expect_raises(RuntimeError, stub, "x")
