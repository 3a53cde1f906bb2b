"""Output files: written atomically, and never over a file that labcore did not write."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

START = 4096  # characters read to recognise a file


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Write a UTF-8 file atomically: `path` is replaced at the end of the block, and unchanged if the block raises.

    After a crash `path` has the old or the new contents, never a part.
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
    """`whole_file` for a path given by the user. Raises ValueError as `refuse_foreign_file` does.

    Links are followed. Special files (terminals, pipes, /dev/null) are written directly.
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

    is_ours   first characters of a file → whether labcore wrote it; an empty file may be overwritten
    kind      the kind of file that labcore writes, with article, for the error message
    """
    path = Path(path)
    if not path.is_file():
        return
    with open(path, "r+", encoding="utf-8", errors="replace") as file:  # +: fails on a read-only file
        start = file.read(START)
    if start and not is_ours(start):
        raise ValueError(f"{path} is there and is not {kind}; it was not touched — name another file.")
