"""`labcore check`: which exercises are done, what comes next; or run a notebook and say what its checks say."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from labcore.course.author.notebooks import execute, read_notebook
from labcore.course.learner.exercise import notebook_exercises, notebooks_with_exercises
from labcore.course.learner.progress import NAME, Progress, load_progress, progress_path, progress_table, what_comes_next
from labcore.course.project import project_folder


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore check`."""
    parser = subparsers.add_parser("check", help="which exercises are done, and what comes next")
    parser.add_argument(
        "notebook", nargs="?", help="a notebook file to run and check, or a number such as 02 (default: all)"
    )
    parser.add_argument("--folder", type=Path, help="where you work (default: here, or notebooks/ here)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Exit status 1 if a notebook was run and one of its exercises isn't done."""
    if arguments.notebook and arguments.notebook.endswith(".ipynb"):
        path = Path(arguments.notebook)
        progress, numbers = run_and_judge(path), [path.stem[:2]]
        if not notebook_exercises(numbers[0]):
            raise ValueError(
                f"{path.name} is not one of the course's notebooks; their names begin with a number, 02_….ipynb."
            )
    else:
        progress = load_progress(find_progress_file(arguments.folder))
        numbers = [arguments.notebook.zfill(2)] if arguments.notebook else notebooks_with_exercises()
    if arguments.json:
        print(json.dumps(as_data(progress, numbers), indent=1))
    else:
        print(progress_table(progress, numbers[0] if arguments.notebook else None))
    ran = bool(arguments.notebook) and arguments.notebook.endswith(".ipynb")
    return 1 if ran and not all(progress.is_done(e.id) for e in notebook_exercises(numbers[0])) else 0


def run_and_judge(path: Path) -> Progress:
    """Execute a copy of the notebook in a fresh kernel in its folder; what its checks said. The file isn't touched."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / NAME
        execute(read_notebook(path), path.absolute().parent, allow_errors=True, progress=str(record))
        return load_progress(record)


def find_progress_file(folder: Path | None) -> Path:
    """The learner's progress: in `folder`; or where LABCORE_PROGRESS says, here, or in the course's notebooks/."""
    if folder:
        if not folder.is_dir():
            raise ValueError(f"--folder is {folder}; it must be a folder that exists.")
        return folder / NAME
    here = progress_path() or Path.cwd() / NAME
    places = [here, Path.cwd() / "notebooks" / NAME, project_folder() / "notebooks" / NAME]
    return next((place for place in places if place.exists()), here)


def as_data(progress: Progress, numbers: list[str]) -> dict:
    """Progress as plain data, for --json."""
    exercises = [
        {
            "id": e.id,
            "title": e.title,
            "kind": e.kind,
            "minutes": e.minutes,
            "difficulty": e.difficulty,
            "state": progress.states.get(e.id, "open"),
        }
        for number in numbers
        for e in notebook_exercises(number)
    ]
    left = sum(e["minutes"] for e in exercises if e["state"] != "done")
    following = what_comes_next(progress, numbers[0] if len(numbers) == 1 else None)
    return {"exercises": exercises, "minutes_left": left, "next": following, "note": progress.note}
