"""Locate an error in the learner's code: a function and a line, without file names or addresses."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

_FOLDERS = {str(Path(__file__).parents[2])} | {
    sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")
}
_NOT_THEIRS = ("<frozen", *(folder + os.sep for folder in _FOLDERS))


def locate_error(error: BaseException) -> str:
    """The learner's innermost line on the way to `error`: "line 7 of free: `ids.pop()`"; "" if there is none."""
    return _innermost(_traceback_lines(error.__traceback__))


def locate_frame(frame: FrameType | None) -> str:
    """The learner's innermost line that a running thread is in; "" if there is none."""
    return _innermost(reversed(list(_frame_lines(frame))))


def _traceback_lines(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _frame_lines(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost(lines: Iterable[tuple[FrameType, int]]) -> str:
    theirs = [(f, n) for f, n in lines if not f.f_code.co_filename.startswith(_NOT_THEIRS)]
    if not theirs:
        return ""
    frame, number = theirs[-1]
    text = linecache.getline(frame.f_code.co_filename, number).strip()
    return f"in {frame.f_code.co_name}" + (f", at `{text}`" if text else "")
