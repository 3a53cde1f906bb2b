"""What every figure is quoted with: which benchmark, on what machine, with which versions."""

from __future__ import annotations

import platform
from types import ModuleType


def circumstances(benchmark: str, *modules: ModuleType, cores: int | None = None) -> dict:
    """The head of a benchmark's JSON report.

    modules   packages whose version bears on the figures, beside Python's
    cores     threads that computed; None where there was one and no choice
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
