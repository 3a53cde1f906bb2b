"""Which folder is an environment that labcore made. Only such a folder is ever written to, emptied or deleted.

A marker file in it says so. It is written before anything else, and deleted last.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from labcore.setup.explanations import SetupError

MARKER = "labcore-environment"
STAMP, UNFINISHED = "labcore-installed", "labcore-unfinished"
MARKS = (MARKER, STAMP, UNFINISHED)
"""The last two also mark an environment that was made before there was a marker."""

PARTS = {"bin", "include", "lib", "lib64", "scripts", "share", "etc", "man", "pyvenv.cfg", ".gitignore"}
"""What `python -m venv` and pip put at the top of an environment, in lower case."""


def mark(venv: Path) -> None:
    """Say in `venv`, an existing folder, that labcore made it."""
    (venv / MARKER).write_text("labcore made this Python environment: `make clean` deletes all of this folder.\n")


def why_not_ours(venv: Path, project: Path, or_empty: bool = False) -> str:
    """Why `venv`, which exists, is not an environment that labcore made, as the rest of a sentence; "" if it is one.

    or_empty    an empty folder will do, too: an environment may be made in it

    The project's folder, the home folder and what holds them never will, whatever marks they have; nor will a link.
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
    """Delete what is in `venv`, an environment that labcore made; its marks last, so that this can be interrupted.

    Raises SetupError, and deletes nothing, if there is anything in it that an environment doesn't have.
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
