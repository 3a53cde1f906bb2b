"""`labcore check`: which exercises are done, what comes next; or run a notebook and say what its checks say."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labcore.course.author.notebooks import (
    RUN_LIMIT_SECONDS,
    CellInterrupted,
    RunStopped,
    cell_calls,
    execute,
    read_notebook,
)
from labcore.course.learner.exercise import notebook_exercises, notebooks_with_exercises
from labcore.course.learner.exercises_only import exercises_only
from labcore.course.learner.progress import NAME, Progress, load_progress, progress_path, progress_table, what_comes_next
from labcore.course.learner.text import shorten
from labcore.course.project import project_folder

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_CELL_SECONDS = 86_400


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore check`."""
    parser = subparsers.add_parser("check", help="which exercises are done, and what comes next")
    parser.add_argument(
        "notebook", nargs="?", help="a notebook file to run and check, or a number such as 02 (default: all)"
    )
    parser.add_argument("--folder", type=Path, help="where you work (default: here, or notebooks/ here)")
    parser.add_argument(
        "--cell-timeout",
        type=float,
        metavar="SECONDS",
        help=f"how long one cell of the notebook may run (default: {RUN_LIMIT_SECONDS})",
    )
    parser.add_argument(
        "--exercises-only",
        action="store_true",
        help="run the notebook's definitions and checks alone: seconds instead of minutes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Stop:
    """Where and why the run of a notebook ended before its last cell. cell counts all cells, from 1."""

    cell: int
    line: str
    reason: str
    interrupted: bool = False

    def __str__(self) -> str:
        return f"stopped at cell {self.cell} (`{self.line}`): {self.reason}."


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Exit status 1 if a notebook was run and one of its exercises isn't done, 130 after Ctrl-C."""
    if arguments.notebook and arguments.notebook.lower().endswith(".ipynb"):
        return run_notebook_file(arguments)
    for option, value in (("--cell-timeout", arguments.cell_timeout), ("--exercises-only", arguments.exercises_only or None)):
        if value is not None:
            raise ValueError(f"{option} is for a notebook file to run: labcore check 02_….ipynb {option}.")
    numbers = known = notebooks_with_exercises()
    if arguments.notebook is not None:
        numbers = [arguments.notebook.zfill(2)]
        if numbers[0] not in known:
            raise ValueError(f"notebook is {arguments.notebook!r}; it must be a file, or one of {', '.join(known)}.")
    progress = load_progress(find_progress_file(arguments.folder))
    show(progress, numbers, arguments)
    return 0


def run_notebook_file(arguments: argparse.Namespace) -> int:
    """Run and judge one notebook."""
    path, number = Path(arguments.notebook).expanduser(), Path(arguments.notebook).stem[:2]
    limit = RUN_LIMIT_SECONDS if arguments.cell_timeout is None else arguments.cell_timeout
    if not 1 <= limit <= MAX_CELL_SECONDS:
        raise ValueError(f"--cell-timeout is {limit:g}; it must be a number of seconds from 1 to {MAX_CELL_SECONDS:,}.")
    if path.exists() and not notebook_exercises(number):
        raise ValueError(
            f"{path.name} is not one of the course's notebooks; their names begin with a number, 02_….ipynb."
        )
    verdicts: list[str] = []

    def tell(verdict: str) -> None:
        verdicts.append(verdict)
        if not arguments.json:
            print(verdict, flush=True)

    progress, stop = run_and_judge(path, limit, tell, arguments.exercises_only)
    show(progress, [number], arguments, stop, verdicts)
    if stop is not None:
        return 130 if stop.interrupted else 1
    return 0 if all(progress.is_done(e.id) for e in notebook_exercises(number)) else 1


def run_and_judge(
    path: Path, limit: float, tell: Callable[[str], None] = lambda _: None, only_exercises: bool = False
) -> tuple[Progress, Stop | None]:
    """Execute a copy of the notebook in a fresh kernel in its folder: what its checks said, and where it broke off.

    limit            seconds that one cell may take
    tell             called with each verdict as soon as it is there
    only_exercises   run definitions and checks alone
    The file isn't touched. Exercises that a broken run didn't come to are "not run".
    """
    notebook, stop = read_notebook(path), None
    notebook = exercises_only(notebook) if only_exercises else notebook

    def on_cell(cell: NotebookNode) -> None:
        if any(cell_calls(cell, "check")):
            for text in [output.text.strip() for output in cell.outputs if output.output_type == "stream"]:
                tell(text)

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / NAME
        try:
            execute(notebook, path.absolute().parent, allow_errors=True, limit=limit, progress=str(record), on_cell=on_cell)
        except RunStopped as error:
            stop = Stop(error.number, first_line(notebook.cells[error.number - 1].source), error.reason)
        except CellInterrupted as error:
            stop = Stop(error.number, first_line(notebook.cells[error.number - 1].source), "interrupted", True)
        progress = load_progress(record)
    if stop is not None:
        for exercise in notebook_exercises(path.stem[:2]):
            progress.states.setdefault(exercise.id, "not run")
    return progress, stop


def first_line(source: str) -> str:
    """The first line of a cell that isn't empty, shortened: by it a cell is found in a notebook."""
    return shorten(next((line for line in source.splitlines() if line.strip()), ""), 60)


def show(
    progress: Progress,
    numbers: list[str],
    arguments: argparse.Namespace,
    stop: Stop | None = None,
    verdicts: Sequence[str] = (),
) -> None:
    """Print the table, or the same as JSON, and what ended a run before its end."""
    if arguments.json:
        print(json.dumps({**as_data(progress, numbers, stop), "verdicts": list(verdicts)}, indent=1))
    else:
        print(progress_table(progress, numbers[0] if arguments.notebook else None))
        if stop is not None:
            print(stop)


def find_progress_file(folder: Path | None) -> Path:
    """The learner's progress: in `folder`; or where LABCORE_PROGRESS says, here, or in the course's notebooks/."""
    if folder:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise ValueError(f"--folder is {folder}; it must be a folder that exists.")
        return folder / NAME
    here = progress_path() or Path.cwd() / NAME
    places = [here, Path.cwd() / "notebooks" / NAME, project_folder() / "notebooks" / NAME]
    return next((place for place in places if place.exists()), here)


def as_data(progress: Progress, numbers: list[str], stop: Stop | None = None) -> dict:
    """Progress as plain data, for --json; "stopped" is null, or where and why the run of a notebook broke off."""
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
    stopped = None if stop is None else asdict(stop)
    return {"exercises": exercises, "minutes_left": left, "next": following, "note": progress.note, "stopped": stopped}
