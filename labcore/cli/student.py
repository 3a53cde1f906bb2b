"""`labcore student build --out DIR`: the notebooks without their solutions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from labcore.course.author.notebooks import MalformedNotebook
from labcore.course.author.student_folder import EditedWork, build
from labcore.course.project import project_folder


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore student`."""
    parser = subparsers.add_parser("student", help="make the student edition of the notebooks")
    actions = parser.add_subparsers(metavar="action", required=True)
    builder = actions.add_parser("build", help="write the notebooks without their solutions")
    builder.add_argument("--out", type=Path, required=True, help="the folder to write to")
    builder.add_argument(
        "--notebooks", type=Path, help="the folder with the masters (default: the course's notebooks/)"
    )
    builder.add_argument("--force", action="store_true", help="overwrite files that were edited since they were built")
    builder.add_argument(
        "--nbgrader-source",
        action="store_true",
        help="keep solutions between markers: for source/ of an nbgrader course",
    )
    builder.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the student edition and print the files written; one line on stderr for each error."""
    try:
        masters = arguments.notebooks.expanduser() if arguments.notebooks else project_folder() / "notebooks"
        written = build(masters, arguments.out.expanduser(), arguments.force, arguments.nbgrader_source)
    except (MalformedNotebook, EditedWork) as error:
        for line in str(error).splitlines():
            print(f"labcore: error: {line}", file=sys.stderr)
        return 2 if isinstance(error, MalformedNotebook) else 1
    for path in written:
        print(path)
    return 0
