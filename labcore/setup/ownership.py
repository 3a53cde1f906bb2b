"""Recognise environments created by labcore. Only such a folder is written to, emptied or deleted.

A marker file identifies it: written first, deleted last.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from labcore.setup.explain import SetupError

MARKER = "labcore-environment"
STAMP, UNFINISHED = "labcore-installed", "labcore-unfinished"
MARKS = (MARKER, STAMP, UNFINISHED)
"""The last two identify environments that are older than the marker."""

PARTS = {"bin", "include", "lib", "lib64", "scripts", "share", "etc", "man", "pyvenv.cfg", ".gitignore"}
"""Names that `python -m venv` and pip create at the top of an environment, in lower case."""


def mark(venv: Path) -> None:
    """Write the marker into `venv`, an existing folder."""
    (venv / MARKER).write_text("labcore made this Python environment: `make clean` deletes all of this folder.\n")


def why_not_ours(venv: Path, project: Path, or_empty: bool = False) -> str:
    """Why `venv`, which exists, was not created by labcore, as the predicate of a sentence; "" if it was.

    or_empty    also accept an empty folder: an environment may be created in it

    The project folder, the home folder, their parents and symbolic links are never accepted, even with a marker.
    """
    if venv.is_symlink():
        return f"is a link to {os.readlink(venv)}"
    if not venv.is_dir():
        return "is a file"
    here = venv.resolve()
    for place, name in ((project, "the project's folder"), (Path(os.path.expanduser("~")), "your home folder")):
        place = place.resolve()
        if here == place or here in place.parents:
            return f"{'is' if here == place else 'holds'} {name}"
    if any((venv / name).is_file() for name in MARKS) or (or_empty and not any(venv.iterdir())):
        return ""
    return "was not made by labcore"


def empty(venv: Path) -> None:
    """Delete the content of `venv`, an environment created by labcore; its marks last, so that it can be interrupted.

    Raises SetupError, and deletes nothing, if it contains files that don't belong to an environment.
    """
    names = sorted(os.listdir(venv), key=lambda name: name in MARKS)
    foreign = [name for name in names if name.lower() not in PARTS and not name.startswith("labcore-")]
    if foreign:
        raise SetupError(
            f"{venv} also holds {', '.join(sorted(foreign))}, which labcore did not make; nothing was deleted — move "
            "that elsewhere, then run the same command again."
        )
    for path in (venv / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
