"""The learner's progress: one small file in their folder, `.labcore_progress.json`, and the table made from it.

    {"format": 1, "exercises": {"02.allocate": "done", "02.free": "not yet"}, "kept": {"02.allocate": {"allocate": "def …"}}}

kept: the learner's source that passed last, by exercise and function; the notebook goes on with it if a later version fails.

Written atomically after each check, merged with what other kernels have saved. An unreadable file (torn, or of another
version) is renamed and a new one is begun: no check fails because of it, and nothing is lost.
LABCORE_PROGRESS=off keeps progress in memory only (the course's own runs of its notebooks); any other value is a path,
with `~` for the home folder.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from labcore.course.curriculum import lesson, next_lesson
from labcore.course.learner.exercise import Exercise, notebook_exercises, notebooks_with_exercises
from labcore.course.project import write_atomically
from labcore.files.folder_lock import folder_lock

NAME = ".labcore_progress.json"
FORMAT = 1


@dataclass
class Progress:
    """The last verdict of each exercise, what passed last, and the file that stores both (None: memory only)."""

    path: Path | None
    states: dict[str, str] = field(default_factory=dict)
    note: str = ""  # one sentence for the learner about a file problem
    unsaved: dict[str, str] = field(default_factory=dict)  # verdicts not saved yet; also in `states`
    unreadable: bool = False  # the file exists, but its content is not in `states`
    kept: dict[str, dict[str, str]] = field(default_factory=dict)  # exercise → function → source that passed last
    kept_here: dict[str, dict[str, str]] = field(default_factory=dict)  # those of this kernel; also in `kept`

    def is_done(self, exercise_id: str) -> bool:
        return self.states.get(exercise_id) == "done"

    def record(self, exercise_id: str, done: bool, sources: dict[str, str] | None = None) -> None:
        """Store one verdict, and the sources that passed, and save. An unwritable folder only results in a note."""
        self.states[exercise_id] = self.unsaved[exercise_id] = "done" if done else "not yet"
        if sources:
            self.kept[exercise_id] = self.kept_here[exercise_id] = sources
        if self.path is None:
            return
        try:
            self._save(Path(os.path.realpath(self.path)))
        except OSError as error:
            self.note = f"progress can't be saved here ({error.strerror}); it lasts as long as this kernel."

    def _save(self, path: Path) -> None:
        """Merge the unsaved verdicts into the current file, which another kernel may have changed."""
        with folder_lock(path.parent):
            now = load_progress(path, self.unsaved, self.kept_here)
            self.states, self.note, self.kept = now.states, now.note, now.kept
            if now.unreadable and path.is_file():
                aside = free_name(path)
                path.rename(aside)
                self.note = f"{path.name} could not be read: it is now {aside.name}, and progress starts afresh."
            content = {"format": FORMAT, "exercises": self.states, "kept": self.kept}
            write_atomically(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        self.unsaved.clear()


def progress_path(folder: Path | None = None) -> Path | None:
    """The file that belongs to a folder (the current one by default), or None where progress isn't kept."""
    setting = os.environ.get("LABCORE_PROGRESS", "")
    if setting == "off":
        return None
    return Path(os.path.expanduser(setting)) if setting else (folder or Path.cwd()) / NAME


def load_progress(
    path: Path | None, unsaved: dict[str, str] | None = None, kept_here: dict[str, dict[str, str]] | None = None
) -> Progress:
    """Read the file; `unsaved` verdicts and sources of this kernel come on top. A missing file is an empty start.

    So is one that can't be read: it stays where it is until there is a verdict to save; `note` says so.
    """
    unsaved, kept_here = {} if unsaved is None else unsaved, {} if kept_here is None else kept_here
    afresh = Progress(path, dict(unsaved), unsaved=unsaved, kept=dict(kept_here), kept_here=kept_here)
    if path is None:
        return afresh
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        states = content["exercises"]
        if content["format"] != FORMAT or not all(state in ("done", "not yet") for state in states.values()):
            raise ValueError
        kept = content.get("kept", {})
        if not all(isinstance(source, str) for sources in kept.values() for source in sources.values()):
            raise ValueError
        return replace(afresh, states={**states, **unsaved}, kept={**kept, **kept_here})
    except (FileNotFoundError, NotADirectoryError):
        return afresh
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        note = f"{path.name} can't be read: the next check sets it aside, and progress starts afresh."
        return replace(afresh, note=note, unreadable=True)


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
