"""One caller at a time: a call to an engine that is at work is refused at once, before anything is touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EngineBusy(RuntimeError):
    """The engine is at work on another call. Nothing was changed; the other call goes on."""


class Exclusive:
    """Refuses calls from a second thread, and calls from inside a call: a callback, a part that was plugged in.

    Enter its blocks inside `uninterrupted`: a Ctrl-C between a lock and its release would leave the engine busy for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_changing = False

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep other threads out of the block; this thread may go on calling, one call after the other. Raises EngineBusy."""
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
        """Keep every other call out of the block, those of this thread too. Raises EngineBusy."""
        with self.one_thread():
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False
