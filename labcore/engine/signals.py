"""Ctrl-C at the right moment: held back while the engine's books are being changed, welcome while the model computes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT back inside the block, and deliver it at its end. Elsewhere than in the main thread none arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)
        if held and callable(handler):
            handler(*held[0])
