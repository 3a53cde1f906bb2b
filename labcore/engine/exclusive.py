"""Exclusive access: a call to an engine that is busy is rejected at once, before it changes anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EngineBusy(RuntimeError):
    """The engine is busy with another call, which goes on. Nothing was changed."""


class Exclusive:
    """Rejects calls from a second thread, and calls from inside a call: from a callback or a plugged-in part.

    Enter its blocks inside `defer_sigint`: a Ctrl-C between a lock and its release would leave the engine busy for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_changing = False

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep other threads out of the block; this thread may make one call after the other. Raises EngineBusy."""
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "the engine is busy with a call from another thread; call it from one thread at a time, or make an LLM for "
                "each thread."
            )
        try:
            if self._is_changing:
                raise EngineBusy(
                    "the engine is busy with the call that this one is made from; a callback, or a part that was plugged "
                    "in, must not call it: do it when step() or generate() has returned."
                )
            yield
        finally:
            self._lock.release()

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Keep every other call out of the block, also those of this thread. Raises EngineBusy."""
        with self.one_thread():
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False
