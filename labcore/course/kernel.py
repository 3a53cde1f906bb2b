"""A notebook's kernel that runs cell by cell, each within limits of time and output, and that can be stopped.

nbclient ends a cell by cancelling the task that waits for the kernel's answer, when the kernel has died. `stop` does the
same for other reasons: time is up, the output floods, Ctrl-C. Needs nbclient, so this module is imported where it is used.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

LARGEST_OUTPUT = 10_000_000
"""Characters that one cell may write; an endless print fills the memory at 50 MB/s."""

DIED = "its kernel died, by exit(), for lack of memory, or in compiled code"
INTERRUPTED = "interrupted"


class CellStopped(RuntimeError):
    """A cell was ended before it was done, and with it the run; the message says why."""


class Kernel(NotebookClient):
    """Runs the cells of `notebook` in `folder`; `limit` is in seconds for each. `stopped` says what has ended the run."""

    def __init__(self, notebook: NotebookNode, folder: Path, name: str, limit: float, allow_errors: bool) -> None:
        super().__init__(
            notebook,
            timeout=None,
            kernel_name=name,
            allow_errors=allow_errors,
            record_timing=False,
            store_widget_state=False,
            extra_arguments=["--log-level=ERROR"],  # its warnings are not the learner's business
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=self._look_for_exit,
        )
        self.limit = limit
        self.stopped = ""
        self._written = 0

    def stop(self, reason: str) -> None:
        """End the cell that is running, or the next one before it begins. May be called by a signal handler."""
        self.stopped = self.stopped or reason
        waiting = self.task_poll_for_reply
        if waiting is not None:
            waiting.get_loop().call_soon_threadsafe(waiting.cancel)

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, **options: Any) -> NotebookNode:
        """As in `NotebookClient`. Raises CellStopped for a cell that doesn't come to its end."""
        tasks, self._written = asyncio.all_tasks(), 0
        timer = asyncio.get_running_loop().call_later(self.limit, self.stop, f"it was still running after {self.limit:g} s")
        try:
            if not self.stopped:
                cell = await super().async_execute_cell(cell, cell_index, **options)
        except DeadKernelError:
            self.stopped = self.stopped or DIED
        finally:
            timer.cancel()
            await _end(asyncio.all_tasks() - tasks)
        if self.stopped:
            self.shutdown_kernel = "immediate"  # it may be busy, and not listen
            raise CellStopped(self.stopped)
        return cell

    execute_cell = run_sync(async_execute_cell)

    def output(self, outs: list, msg: dict, display_id: str | None, cell_index: int) -> NotebookNode | None:
        """As in `NotebookClient`, up to LARGEST_OUTPUT."""
        content = msg["content"]
        self._written += len(content["text"] if "text" in content else str(content))
        if self._written > LARGEST_OUTPUT:
            self.stop(f"it wrote more than {LARGEST_OUTPUT // 1_000_000} MB of output")
            return None
        return super().output(outs, msg, display_id, cell_index)

    def _look_for_exit(self, cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        if any(part.get("source") == "ask_exit" for part in execute_reply["content"].get("payload", ())):
            self.stopped = DIED


@contextmanager
def ctrl_c_calls(call: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `call`, which ends the block in good order; a second one raises as always."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def first(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        call()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


async def _end(tasks: set[asyncio.Task]) -> None:
    """Nothing that a cell has begun goes on after it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
