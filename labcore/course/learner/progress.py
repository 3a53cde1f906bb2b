"""The learner's progress: one small file in their folder, `.labcore_progress.json`, and the table made from it.

    {"format": 1, "exercises": {"02.allocate": "done", "02.free": "not yet"}}

Written atomically after each check, with what other kernels have noted meanwhile. A file that can't be read (torn, or
from another version) is set aside under a name of its own, and begun afresh: no check fails over it, nothing is lost.
LABCORE_PROGRESS=off keeps progress in memory only (the course's own runs of its notebooks); any other value is a path,
with `~` for the home folder.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from labcore.course.curriculum import lesson, next_lesson
from labcore.course.learner.exercise import Exercise, notebook_exercises, notebooks_with_exercises
from labcore.course.project import write_atomically
from labcore.files.folder_lock import folder_lock

NAME = ".labcore_progress.json"
FORMAT = 1


@dataclass
class Progress:
    """What the last check of each exercise said, and the file that remembers it (None: nothing does)."""

    path: Path | None
    states: dict[str, str] = field(default_factory=dict)
    note: str = ""  # one sentence for the learner, when the file was not as it should be
    unsaved: dict[str, str] = field(default_factory=dict)  # verdicts that no file holds yet; in `states`, too
    unreadable: bool = False  # the file is there, and `states` knows nothing of what it says

    def is_done(self, exercise_id: str) -> bool:
        return self.states.get(exercise_id) == "done"

    def record(self, exercise_id: str, done: bool) -> None:
        """Note one verdict and save. A folder that can't be written to only leaves a note."""
        self.states[exercise_id] = self.unsaved[exercise_id] = "done" if done else "not yet"
        if self.path is None:
            return
        try:
            self._save(Path(os.path.realpath(self.path)))
        except OSError as error:
            self.note = f"progress can't be saved here ({error.strerror}); it lasts as long as this kernel."

    def _save(self, path: Path) -> None:
        """Add the unsaved verdicts to what the file says now, which another kernel may have changed since we read it."""
        with folder_lock(path.parent):
            now = load_progress(path, self.unsaved)
            self.states, self.note = now.states, now.note
            if now.unreadable and path.is_file():
                aside = free_name(path)
                path.rename(aside)
                self.note = f"{path.name} could not be read: it is now {aside.name}, and progress starts afresh."
            content = json.dumps({"format": FORMAT, "exercises": self.states}, indent=1, sort_keys=True) + "\n"
            write_atomically(path, content)
        self.unsaved.clear()


def progress_path(folder: Path | None = None) -> Path | None:
    """The file that belongs to a folder (the current one by default), or None where progress isn't kept."""
    setting = os.environ.get("LABCORE_PROGRESS", "")
    if setting == "off":
        return None
    return Path(os.path.expanduser(setting)) if setting else (folder or Path.cwd()) / NAME


def load_progress(path: Path | None, unsaved: dict[str, str] | None = None) -> Progress:
    """Read the file; `unsaved` verdicts of this kernel come on top. A missing file is an empty start.

    So is one that can't be read: it stays where it is until there is a verdict to save; `note` says so.
    """
    unsaved = {} if unsaved is None else unsaved
    if path is None:
        return Progress(path, dict(unsaved), unsaved=unsaved)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        states = content["exercises"]
        if content["format"] != FORMAT or not all(state in ("done", "not yet") for state in states.values()):
            raise ValueError
        return Progress(path, {**states, **unsaved}, unsaved=unsaved)
    except (FileNotFoundError, NotADirectoryError):
        return Progress(path, dict(unsaved), unsaved=unsaved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        note = f"{path.name} can't be read: the next check sets it aside, and progress starts afresh."
        return Progress(path, dict(unsaved), note, unsaved, unreadable=True)


def free_name(path: Path) -> Path:
    """A name beside `path` that nothing has yet: `.labcore_progress.unreadable-1.json`."""
    names = (path.with_name(f"{path.stem}.unreadable-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def progress_table(progress: Progress, notebook: str | None = None) -> str:
    """Done, open and minutes left as text: each exercise of one notebook ("02"), or one line a notebook for all."""
    lines = _one_notebook(progress, notebook) if notebook else _all_notebooks(progress)
    return "\n".join(lines + ([progress.note] if progress.note else []))


def what_comes_next(progress: Progress, notebook: str | None = None) -> str:
    """The first exercise that isn't done, in one notebook or in all; or the next notebook."""
    numbers = [notebook] if notebook else notebooks_with_exercises()
    open_exercises = [e for number in numbers for e in notebook_exercises(number) if not progress.is_done(e.id)]
    if open_exercises:
        first = open_exercises[0]
        return f"{first.id}, {first.title} ({first.minutes} min)"
    following = next_lesson(numbers[-1]) if numbers else None
    return f"notebook {following.notebook}" if following else "nothing: the course is complete"


def _one_notebook(progress: Progress, number: str) -> list[str]:
    exercises = notebook_exercises(number)
    if not exercises:
        return [f"notebook {number} has no exercises."]
    rows = [
        f"  {progress.states.get(e.id, 'open'):8} {e.id:24} {e.minutes:3} min  {e.circles}  {e.title}"
        for e in exercises
    ]
    return [_summary(progress, number), *rows, f"next: {what_comes_next(progress, number)}"]


def _all_notebooks(progress: Progress) -> list[str]:
    lines = [_summary(progress, number) for number in notebooks_with_exercises()]
    return [*lines, f"next: {what_comes_next(progress)}"] if lines else ["there are no exercises yet."]


def _summary(progress: Progress, number: str) -> str:
    exercises = notebook_exercises(number)
    left: list[Exercise] = [e for e in exercises if not progress.is_done(e.id)]
    name = lesson(number).notebook if lesson(number) else number
    minutes = f"about {sum(e.minutes for e in left)} minutes left" if left else "complete"
    return f"{name:26} {len(exercises) - len(left)} of {len(exercises)} exercises done, {minutes}"
