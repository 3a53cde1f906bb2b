"""The learner's progress: one small file in their folder, `.labcore_progress.json`, and the table made from it.

    {"format": 1, "exercises": {"02.allocate": "done", "02.free": "not yet"}}

Written atomically after each check. A file that can't be read is set aside and begun afresh: no check fails over it.
LABCORE_PROGRESS=off keeps progress in memory only (the course's own runs of its notebooks); any other value is a path.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from labcore.course.exercises import Exercise, notebook_exercises, notebooks_with_exercises
from labcore.course.files import write_atomically
from labcore.course.house import next_room, room

NAME = ".labcore_progress.json"
FORMAT = 1


@dataclass
class Progress:
    """What the last check of each exercise said, and the file that remembers it (None: nothing does)."""

    path: Path | None
    states: dict[str, str] = field(default_factory=dict)
    note: str = ""  # one sentence for the learner, when the file was not as it should be

    def is_done(self, exercise_id: str) -> bool:
        return self.states.get(exercise_id) == "done"

    def record(self, exercise_id: str, done: bool) -> None:
        """Note one verdict and save. A folder that can't be written to only leaves a note."""
        self.states[exercise_id] = "done" if done else "not yet"
        if self.path is None:
            return
        content = json.dumps({"format": FORMAT, "exercises": self.states}, indent=1, sort_keys=True) + "\n"
        try:
            write_atomically(self.path, content)
        except OSError as error:
            self.note = f"progress can't be saved here ({error.strerror}); it lasts as long as this kernel."


def progress_path(folder: Path | None = None) -> Path | None:
    """The file that belongs to a folder (the current one by default), or None where progress isn't kept."""
    setting = os.environ.get("LABCORE_PROGRESS", "")
    if setting == "off":
        return None
    return Path(setting) if setting else (folder or Path.cwd()) / NAME


def load_progress(path: Path | None) -> Progress:
    """Read the file. A missing one is an empty start; a broken one too, and its name and fate are in `note`."""
    if path is None or not path.exists():
        return Progress(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        states = content["exercises"]
        if content["format"] != FORMAT or not all(state in ("done", "not yet") for state in states.values()):
            raise ValueError
        return Progress(path, dict(states))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Progress(path, note=f"{path.name} could not be read, so progress starts afresh; run the checks again.")


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
    following = next_room(numbers[-1]) if numbers else None
    return f"notebook {following.notebook}" if following else "nothing: the house is built"


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
    name = room(number).notebook if room(number) else number
    minutes = f"about {sum(e.minutes for e in left)} minutes left" if left else "complete"
    return f"{name:26} {len(exercises) - len(left)} of {len(exercises)} exercises done, {minutes}"
