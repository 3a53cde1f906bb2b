"""Files that labcore writes for a reader: whole or not at all, and never over a file that labcore did not write."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

START = 4096  # characters of a file that are read to recognise it


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A UTF-8 file to write in. `path` gets all of it at the end of the block; it stays as it was if the block raises.

    A process or machine that dies on the way leaves the old file or the new one, never half of one.
    """
    temporary = path.with_name(f".labcore-{secrets.token_hex(8)}.new")
    try:
        try:
            file = open(temporary, "x", encoding="utf-8", newline="\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def output_file(path: str | Path, is_ours: Callable[[str], bool], kind: str) -> Iterator[TextIO]:
    """`whole_file` at a place that a reader named. Raises ValueError as `refuse_foreign_file` does.

    A link is followed. What is no ordinary file (a terminal, a pipe, /dev/null) is written to as it is.
    """
    path = Path(os.path.realpath(path))
    refuse_foreign_file(path, is_ours, kind)
    if path.exists() and not path.is_file():
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            yield file
    else:
        with whole_file(path) as file:
            yield file


def refuse_foreign_file(path: str | Path, is_ours: Callable[[str], bool], kind: str) -> None:
    """Raise ValueError if `path` is a file that labcore did not write.

    is_ours   tells by the first characters of a file whether labcore wrote it; an empty file may be written over
    kind      what labcore writes there, with its article, for the message
    """
    path = Path(path)
    if not path.is_file():
        return
    with open(path, "r+", encoding="utf-8", errors="replace") as file:  # +: a file that is read-only stays as it is
        start = file.read(START)
    if start and not is_ours(start):
        raise ValueError(f"{path} is there and is not {kind}; it was not touched — name another file.")
