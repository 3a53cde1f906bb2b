"""The course's lessons: which notebook builds which modules. `labcore course check-promotion` finds gaps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lesson:
    """One notebook and the modules that its code lands in ("attention" stands for every module of that folder)."""

    notebook: str
    parts: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.notebook[:2]


LESSONS = (
    Lesson("00_start_here"),
    Lesson("01_naive_kv_cache", ("baseline.naive",)),
    Lesson("02_block_allocator", ("kvcache.blocks",)),
    Lesson("03_triton_paged_kernel", ("attention",)),
    Lesson("04_continuous_batching", ("kvcache.manager", "scheduler")),
    Lesson("05_prefix_sharing", ("kvcache.prefix", "sampling.beam_search")),
    Lesson("06_chunked_prefill", ("scheduler.chunking", "scheduler.budget")),
    Lesson("07_memory_pressure", ("kvcache.swap", "kvcache.sizing")),
    Lesson("08_kv_compression", ("kvcache.quant",)),
    Lesson("09_tuning_and_monitoring", ("workload.simulate", "workload.traces", "workload.metrics")),
)


def lesson(number: str) -> Lesson | None:
    """The lesson with this number, "02"; None if there is none."""
    return next((each for each in LESSONS if each.number == number), None)


def next_lesson(number: str) -> Lesson | None:
    """The lesson after notebook `number`, or None after the last."""
    return next((each for each in LESSONS if each.number > number), None)


def notebook_files(folder: Path) -> list[Path]:
    """The course's notebooks in a folder, in their order: 00_….ipynb, 01_….ipynb."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))
