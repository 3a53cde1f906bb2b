"""Folder lock: one process at a time, without a lock file that could become stale."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, which must exist; `on_wait` is called if another process holds it.

    The folder itself is locked; the system releases the lock when the process dies. Without such locks (Windows, some
    network disks) the block runs unlocked. Raises FileNotFoundError if the folder was deleted while waiting.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # the file system has no locks
        if not (os.path.isdir(folder) and os.path.samestat(os.fstat(handle), os.stat(folder))):
            raise FileNotFoundError(errno.ENOENT, "deleted by another process; run the same again", str(folder))
        yield
    finally:
        os.close(handle)
