"""Run the learner's code with a timeout, in any kernel, on any platform.

The code runs in a daemon thread. At the timeout, `TimedOut` is raised in that thread between two bytecodes, which ends a
`while True: pass`. A thread in a long C call (a sleep, a large product) can't be interrupted: it is abandoned, and
`TimedOut` is raised when the call returns. A C call that never releases the GIL (`sum(itertools.count())`) can't be ended.
"""

from __future__ import annotations

import contextvars
import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labcore.course.learner.locate_error import locate_frame


class TimedOut(SystemExit):
    """Raised in the thread at the timeout. Not an `Exception`, so that `except Exception` doesn't catch it; a `SystemExit`
    ends a thread silently."""


@dataclass
class Outcome:
    """The outcome of a call: its value, its error, or its location at the timeout."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    location: str = ""  # the line at the timeout


def run_with_timeout(call: Callable[[], Any], seconds: float) -> Outcome:
    """Call `call()` for at most `seconds`; never raises what it raises. A KeyboardInterrupt of ours stops it, too."""
    outcome, done = Outcome(), threading.Event()

    def work() -> None:
        try:
            outcome.value = call()
        except BaseException as error:  # SystemExit of a learner's exit() as well
            outcome.error = error
        finally:
            done.set()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="labcore check", daemon=True)
    deadline = time.monotonic() + seconds
    try:
        thread.start()
        while not (finished := done.is_set()) and time.monotonic() < deadline:
            done.wait(min(0.1, seconds))  # in short turns: on Windows a long one can't be interrupted
    except BaseException:
        _stop(thread)
        raise
    if finished:
        return outcome
    location = locate_frame(sys._current_frames().get(thread.ident))
    _stop(thread)
    return Outcome(timed_out=True, location=location)


def _stop(thread: threading.Thread, grace: float = 1.0) -> None:
    """Raise `TimedOut` in the thread repeatedly for `grace` seconds: a bare `except:` may catch some of them."""
    deadline = time.monotonic() + grace
    while thread.is_alive() and time.monotonic() < deadline:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimedOut))
        thread.join(0.002)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random number generators afterwards, so that a check doesn't change the random numbers of later cells."""
    python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
    numpy_state = numpy.random.get_state() if numpy else None
    torch_state = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if torch_state is not None:
            torch.set_rng_state(torch_state)
