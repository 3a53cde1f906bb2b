"""Run information reported with every figure: benchmark, machine, versions."""

from __future__ import annotations

import platform
from types import ModuleType


def run_info(benchmark: str, *modules: ModuleType, cores: int | None = None) -> dict:
    """The head of a benchmark's JSON report.

    modules   packages whose versions are reported, in addition to Python's
    cores     number of compute threads; None if always one
    """
    machine = {"processor": platform.machine(), "system": platform.system()}
    if cores is not None:
        machine["cores"] = cores
    versions = {module.__name__: module.__version__ for module in modules}
    return {
        "benchmark": benchmark,
        "machine": machine,
        "versions": {**versions, "python": platform.python_version()},
    }
