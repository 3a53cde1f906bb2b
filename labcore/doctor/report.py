"""The machine check: what labcore needs, whether it is there, and what to do if not.

    Machine (facts, machine.py)  →  one function a row  →  rows  →  a table, or JSON

Each row is a pure function of the facts, so every situation is tested without its hardware. What the marks mean:

    ok     as it should be
    warn   everything runs, with a limit that the row names
    fail   something of the course will not run until this is mended
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from labcore.doctor.facts import Gpu, Machine, gather

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH, OLDEST_TRITON = "2.11", "3.6"
OLDEST_TRANSFORMERS, TOO_NEW_TRANSFORMERS = "5.17", "6"
OLDEST_GPU = (7, 5)  # Turing, the T4
WITHOUT_TRITON = "all but the kernels of notebook 03 runs, on torch's attention"
OLDEST_DRIVER = {12: "525", 13: "580"}  # the first driver that serves every 12.x, 13.x
INSTALL = "run `make lab`, or pip install -r requirements.lock"


@dataclass(frozen=True)
class Row:
    """One line of the check. `status` is "ok", "warn" or "fail"; `advice` says what to do, empty when ok."""

    name: str
    status: str
    found: str
    advice: str = ""


def diagnose(machine: Machine) -> list[Row]:
    """What the facts mean, one row for each thing that labcore needs."""
    return [row(machine) for row in ROWS]


def python_row(machine: Machine) -> Row:
    found = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        return Row("Python", "fail", found, "install Python 3.10 or newer, then make lab PYTHON=/path/to/it")
    if machine.bits != 64:
        return Row("Python", "fail", f"{found}, {machine.bits} bits", "install a 64-bit Python: torch has no other")
    return Row("Python", "ok", found)


def torch_row(machine: Machine) -> Row:
    row = package_row(machine, "torch", OLDEST_TORCH)
    if row.status != "ok":
        return row
    return Row("torch", "ok", f"{row.found}, " + (f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU build"))


def triton_row(machine: Machine) -> Row:
    """Only the kernel stage needs Triton, and only Linux has it."""
    version = machine.versions.get("triton")
    if version is None and machine.system != "Linux":
        return Row("triton", "warn", f"not made for {machine.system}", f"nothing to do: {WITHOUT_TRITON}")
    row = package_row(machine, "triton", OLDEST_TRITON)
    if row.status != "ok":
        return Row("triton", row.status, row.found, f"{row.advice}; until then {WITHOUT_TRITON}")
    needed = machine.torch_needs_triton
    if machine.torch_cuda and needed and needed != version:
        return Row("triton", "warn", f"{version}, torch asks for {needed}", f"pip install triton=={needed}")
    if machine.torch_sees_gpu and not machine.c_compiler:
        advice = "install gcc and Python's headers (Debian, Ubuntu: gcc python3-dev), Triton starts kernels with them"
        return Row("triton", "fail", f"{version}, no C compiler", advice)
    return Row("triton", "ok", version)


def transformers_row(machine: Machine) -> Row:
    return package_row(machine, "transformers", OLDEST_TRANSFORMERS, TOO_NEW_TRANSFORMERS)


def gpu_row(machine: Machine) -> Row:
    """The GPU, and the four ways in which one that is there can't be used."""
    if not machine.gpus and not machine.driver:
        return Row("GPU", "ok", "none: everything runs on the CPU")
    found = describe(machine.gpus) if machine.gpus else f"none that answers, driver {machine.driver}"
    if machine.torch_sees_gpu:
        capability = machine.gpus[0].capability
        if capability is not None and capability < OLDEST_GPU:
            return Row("GPU", "fail", found, 'older than sm_75, for which nothing is built: pass device="cpu"')
        return Row("GPU", "ok", found)
    if "torch" not in machine.versions or "torch" in machine.broken:
        return Row("GPU", "warn", found, "can't be used before torch is mended")
    if machine.torch_cuda is None:
        advice = "everything runs, on the CPU; to use the GPU install a CUDA build of torch (README, GPU)"
        return Row("GPU", "warn", f"{found}, but torch is a CPU build", advice)
    wanted = int(machine.torch_cuda.split(".")[0])
    if machine.driver_cuda is not None and machine.driver_cuda[0] < wanted:
        serves = f"driver {machine.driver or '?'} serves CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}"
        advice = (
            f"update the driver to {OLDEST_DRIVER.get(wanted, 'a newer one')} or later, or install a build of torch "
            f"for CUDA {machine.driver_cuda[0]} (README, GPU); until then the CPU is used"
        )
        return Row("GPU", "fail", f"{found}; {serves}, torch needs {machine.torch_cuda}", advice)
    if machine.hidden_by is not None:
        hidden = f"hidden by CUDA_VISIBLE_DEVICES={machine.hidden_by!r}"
        return Row("GPU", "warn", f"{found}, {hidden}", "unset it to use the GPU")
    return Row("GPU", "fail", f"{found}, but torch can't reach it", "run nvidia-smi: it says what the driver lacks")


def memory_row(machine: Machine) -> Row:
    total, free = machine.memory_gib, machine.memory_free_gib
    if total is None or free is None:
        return Row("memory", "warn", "the system does not tell", "2 GiB must be free")
    found = f"{free:.1f} GiB free of {total:.1f}"
    if total < 3:
        return Row("memory", "fail", found, "4 GiB are needed: model, KV pool and notebook take about 2.5")
    if free < 3:
        return Row("memory", "warn", found, "close other programs and idle kernels, or lower kv_cache_memory_gb")
    return Row("memory", "ok", found)


def disk_row(machine: Machine) -> Row:
    free = machine.disk_free_gib
    needed = 0.2 if machine.model_cached else 1.0
    if free is None:
        return Row("disk", "warn", "the system does not tell", f"{needed:g} GiB must be free for the model")
    if free < needed:
        return Row("disk", "fail", f"{free:.1f} GiB free", f"free {needed:g} GiB on the disk of your cache folder")
    return Row("disk", "ok", f"{free:.0f} GiB free")


def model_row(machine: Machine) -> Row:
    if machine.model_cached:
        return Row("model cache", "ok", "smollm2-135m is there")
    return Row("model cache", "warn", "smollm2-135m is not there yet", "run `labcore fetch` (93 MB)")


def jupyter_row(machine: Machine) -> Row:
    missing = [name for name in ("jupyterlab", "ipykernel") if name not in machine.versions]
    if missing:
        return Row("Jupyter", "fail", f"{' and '.join(missing)} not installed", INSTALL)
    found = f"JupyterLab {machine.versions['jupyterlab']}"
    if machine.kernel is None:
        return Row("Jupyter", "fail", f"{found}, no kernel python3", "run python -m ipykernel install --sys-prefix")
    if machine.kernel == "other":
        advice = "start JupyterLab with `make lab`, which picks ours"
        return Row("Jupyter", "warn", f"{found}, kernel python3 is another Python's", advice)
    return Row("Jupyter", "ok", found)


ROWS: tuple[Callable[[Machine], Row], ...] = (
    python_row,
    torch_row,
    triton_row,
    transformers_row,
    gpu_row,
    memory_row,
    disk_row,
    model_row,
    jupyter_row,
)


def package_row(machine: Machine, name: str, oldest: str, too_new: str | None = None) -> Row:
    """A package: installed, importable, in its range."""
    version = machine.versions.get(name)
    if version is None:
        return Row(name, "fail", "not installed", INSTALL)
    if name in machine.broken:
        advice = "run `make clean`, then `make lab`"
        return Row(name, "fail", f"{version} does not import: {machine.broken[name]}", advice)
    if numbers(version) < numbers(oldest):
        return Row(name, "fail", version, f"{oldest} or newer is needed: {INSTALL}")
    if too_new is not None and numbers(version) >= numbers(too_new):
        return Row(name, "fail", version, f"a version below {too_new} is needed: {INSTALL}")
    return Row(name, "ok", version)


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: "2.13.0+cpu" → (2, 13, 0), "2.14.0a0" → (2, 14, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def describe(gpus: tuple[Gpu, ...]) -> str:
    """The first GPU in words, and how many more there are."""
    first = gpus[0]
    text = f"{first.name}, {first.memory_gib:.0f} GiB"
    if first.capability is not None:
        text += f", sm_{first.capability[0]}{first.capability[1]}"
    return text + (f" (and {len(gpus) - 1} more)" if len(gpus) > 1 else "")


def table(rows: list[Row]) -> str:
    """The rows as text, advice under the row that it belongs to."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.status:<4}  {row.name:<{width}}  {row.found}")
        if row.advice:
            lines.append(f"      {'':<{width}}  → {row.advice}")
    return "\n".join(lines)


def doctor() -> bool:
    """Check this machine and print the table. True if nothing failed: `assert doctor()` in a notebook."""
    rows = diagnose(gather())
    print(table(rows))
    return passed(rows)


def passed(rows: list[Row]) -> bool:
    """Whether the course runs here; warnings do not count."""
    return all(row.status != "fail" for row in rows)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore doctor`."""
    parser = subparsers.add_parser("doctor", help="check this machine: what is there, what is missing, what to do")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """`labcore doctor`: exit status 1 if a row failed."""
    rows = diagnose(gather())
    if arguments.json:
        print(json.dumps({"ok": passed(rows), "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(table(rows))
    return 0 if passed(rows) else 1
