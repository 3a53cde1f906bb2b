"""Defer SIGINT while engine state is updated; deliver it where a step can still be undone, or at the end of the call.

    with defer_sigint():                      Ctrl-C is held back
        plan = schedule()
        with interruptible():                 Ctrl-C, also one that was held back, raises KeyboardInterrupt
            logits = run(plan)
        update(logits)
    ...                                       one that is still held back is delivered here

Blocks nest: only the outermost delivers at its end. Once Ctrl-C has broken into an `interruptible` block, the next one
is held back, so that a second Ctrl-C never disturbs the clean-up after the first. If a plugged-in part hangs, a
Ctrl-C that comes `PATIENCE` seconds after the first is delivered at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

PATIENCE = 2.0
"""Seconds for which SIGINT is held back at most. No state update takes as long."""


class DeferredSigint:
    """The SIGINT handler inside `defer_sigint`. handler: the one before, which is called when SIGINT is delivered."""

    in_force: ClassVar[DeferredSigint | None] = None

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.is_open = False
        self.held: tuple | None = None
        self.held_since = 0.0

    def __call__(self, *arguments: Any) -> None:
        if self.held is not None and time.monotonic() - self.held_since > PATIENCE:
            self.held = None
        elif not self.is_open:
            if self.held is None:
                self.held, self.held_since = arguments, time.monotonic()
            return
        was_open, self.is_open = self.is_open, False
        self.handler(*arguments)
        self.is_open = was_open  # the handler didn't raise

    def open(self, is_open: bool) -> None:
        """Deliver from now on, beginning with what was held back; or hold back from now on."""
        self.is_open = is_open
        if is_open and self.held is not None:
            arguments, self.held = self.held, None
            self(*arguments)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Hold SIGINT back inside the block, and deliver it at its end. Python interrupts the main thread alone."""
    outer = deferred()
    if outer is not None:
        was_open = outer.is_open
        outer.open(False)
        try:
            yield
        finally:
            outer.open(was_open)
        return
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # ignored, or ends the process
        yield
        return
    inner = DeferredSigint(handler)
    signal.signal(signal.SIGINT, inner)
    DeferredSigint.in_force = inner
    try:
        yield
    except KeyboardInterrupt:
        inner.held = None  # two in a row are one
        raise
    finally:
        DeferredSigint.in_force = None
        signal.signal(signal.SIGINT, handler)
        if inner.held is not None:
            handler(*inner.held)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT through inside a block of `defer_sigint`: what it breaks off here can be undone."""
    outer = deferred()
    if outer is None:
        yield
        return
    try:
        outer.open(True)
        yield
    finally:
        outer.open(False)


def deferred() -> DeferredSigint | None:
    """The handler of the `defer_sigint` block that this thread is in."""
    return DeferredSigint.in_force if threading.current_thread() is threading.main_thread() else None
