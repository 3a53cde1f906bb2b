"""The house, room by room: which notebook builds which modules. `promote --check` sees that none is forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """One notebook and the modules that its code lands in ("attention" stands for every module of that folder)."""

    notebook: str
    parts: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.notebook[:2]


HOUSE = (
    Room("00_start_here"),
    Room("01_naive_kv_cache", ("baseline.naive",)),
    Room("02_block_allocator", ("kvcache.blocks",)),
    Room("03_triton_paged_kernel", ("attention",)),
    Room("04_continuous_batching", ("scheduler",)),
    Room("05_prefix_sharing", ("kvcache.prefix", "sampling.beam_search")),
    Room("06_chunked_prefill", ("scheduler.chunking", "scheduler.budget")),
    Room("07_memory_pressure", ("kvcache.swap", "kvcache.sizing")),
    Room("08_kv_compression", ("kvcache.quant",)),
    Room("09_tuning_and_monitoring", ("workload.simulate", "workload.traces", "workload.metrics")),
)


def room(number: str) -> Room | None:
    """The room of a notebook by its number, "02"; None if the house has no such room."""
    return next((r for r in HOUSE if r.number == number), None)


def next_room(number: str) -> Room | None:
    """The room that comes after notebook `number`, or None after the last."""
    return next((r for r in HOUSE if r.number > number), None)


def notebook_files(folder: Path) -> list[Path]:
    """The course's notebooks in a folder, in their order: 00_….ipynb, 01_….ipynb."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))
