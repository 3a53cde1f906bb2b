"""The machine check: what labcore needs, whether it is present, and what to do if not.

    Machine (facts.py)  →  one function a check  →  findings  →  a table, or JSON

Each check is a pure function of the facts, so every situation is tested without its hardware. Statuses:

    ok     as it should be
    warn   everything runs, with a limitation that the finding names
    fail   part of the course will not run until this is fixed
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
class Finding:
    """The result of one check. `status` is "ok", "warn" or "fail"; `advice` says what to do, empty when ok."""

    name: str
    status: str
    found: str
    advice: str = ""


def diagnose(machine: Machine) -> list[Finding]:
    """Run all checks: one finding for each thing that labcore needs."""
    return [check(machine) for check in CHECKS]


def check_python(machine: Machine) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        return Finding("Python", "fail", found, "install Python 3.10 or newer, then make lab PYTHON=/path/to/it")
    if machine.bits != 64:
        return Finding("Python", "fail", f"{found}, {machine.bits} bits", "install a 64-bit Python: torch has no other")
    return Finding("Python", "ok", found)


def check_torch(machine: Machine) -> Finding:
    finding = check_package(machine, "torch", OLDEST_TORCH)
    if finding.status != "ok":
        return finding
    return Finding("torch", "ok", f"{finding.found}, " + (f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU build"))


def check_triton(machine: Machine) -> Finding:
    """Only the Triton backend needs Triton, and only Linux has it."""
    version = machine.versions.get("triton")
    if version is None and machine.system != "Linux":
        return Finding("triton", "warn", f"not made for {machine.system}", f"nothing to do: {WITHOUT_TRITON}")
    finding = check_package(machine, "triton", OLDEST_TRITON)
    if finding.status != "ok":
        return Finding("triton", finding.status, finding.found, f"{finding.advice}; until then {WITHOUT_TRITON}")
    needed = machine.torch_needs_triton
    if machine.torch_cuda and needed and needed != version:
        return Finding("triton", "warn", f"{version}, torch asks for {needed}", f"pip install triton=={needed}")
    if machine.torch_sees_gpu and not machine.c_compiler:
        advice = "install gcc and Python's headers (Debian, Ubuntu: gcc python3-dev), Triton starts kernels with them"
        return Finding("triton", "fail", f"{version}, no C compiler", advice)
    return Finding("triton", "ok", version)


def check_transformers(machine: Machine) -> Finding:
    return check_package(machine, "transformers", OLDEST_TRANSFORMERS, TOO_NEW_TRANSFORMERS)


def check_gpu(machine: Machine) -> Finding:
    """The GPU, and the reasons why one that is present can't be used."""
    if not machine.gpus and not machine.driver:
        return Finding("GPU", "ok", "none: everything runs on the CPU")
    found = describe(machine.gpus) if machine.gpus else f"none that answers, driver {machine.driver}"
    if machine.torch_sees_gpu:
        capability = machine.gpus[0].capability
        if capability is not None and capability < OLDEST_GPU:
            return Finding("GPU", "fail", found, 'older than sm_75, for which nothing is built: pass device="cpu"')
        return Finding("GPU", "ok", found)
    if "torch" not in machine.versions or "torch" in machine.broken:
        return Finding("GPU", "warn", found, "can't be used before torch is fixed")
    if machine.torch_cuda is None:
        advice = "everything runs, on the CPU; to use the GPU install a CUDA build of torch (README, GPU)"
        return Finding("GPU", "warn", f"{found}, but torch is a CPU build", advice)
    wanted = int(machine.torch_cuda.split(".")[0])
    if machine.driver_cuda is not None and machine.driver_cuda[0] < wanted:
        serves = f"driver {machine.driver or '?'} serves CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}"
        advice = (
            f"update the driver to {OLDEST_DRIVER.get(wanted, 'a newer one')} or later, or install a build of torch "
            f"for CUDA {machine.driver_cuda[0]} (README, GPU); until then the CPU is used"
        )
        return Finding("GPU", "fail", f"{found}; {serves}, torch needs {machine.torch_cuda}", advice)
    if machine.hidden_by is not None:
        hidden = f"hidden by CUDA_VISIBLE_DEVICES={machine.hidden_by!r}"
        return Finding("GPU", "warn", f"{found}, {hidden}", "unset it to use the GPU")
    return Finding("GPU", "fail", f"{found}, but torch can't reach it", "run nvidia-smi: it says what the driver lacks")


def check_memory(machine: Machine) -> Finding:
    total, free = machine.memory_gib, machine.memory_free_gib
    if total is None or free is None:
        return Finding("memory", "warn", "the system does not tell", "2 GiB must be free")
    found = f"{free:.1f} GiB free of {total:.1f}"
    if total < 3:
        return Finding("memory", "fail", found, "4 GiB are needed: model, KV pool and notebook take about 2.5")
    if free < 3:
        return Finding("memory", "warn", found, "close other programs and idle kernels, or lower kv_cache_memory_gb")
    return Finding("memory", "ok", found)


def check_disk(machine: Machine) -> Finding:
    free = machine.disk_free_gib
    needed = 0.2 if machine.model_cached else 1.0
    if free is None:
        return Finding("disk", "warn", "the system does not tell", f"{needed:g} GiB must be free for the model")
    if free < needed:
        return Finding("disk", "fail", f"{free:.1f} GiB free", f"free {needed:g} GiB on the disk of your cache folder")
    return Finding("disk", "ok", f"{free:.0f} GiB free")


def check_model(machine: Machine) -> Finding:
    if machine.model_cached:
        return Finding("model cache", "ok", "smollm2-135m is there")
    return Finding("model cache", "warn", "smollm2-135m is not there yet", "run `labcore fetch` (93 MB)")


def check_jupyter(machine: Machine) -> Finding:
    missing = [name for name in ("jupyterlab", "ipykernel") if name not in machine.versions]
    if missing:
        return Finding("Jupyter", "fail", f"{' and '.join(missing)} not installed", INSTALL)
    found = f"JupyterLab {machine.versions['jupyterlab']}"
    if machine.kernel is None:
        return Finding("Jupyter", "fail", f"{found}, no kernel python3", "run python -m ipykernel install --sys-prefix")
    if machine.kernel == "other":
        advice = "start JupyterLab with `make lab`, which picks ours"
        return Finding("Jupyter", "warn", f"{found}, kernel python3 is another Python's", advice)
    return Finding("Jupyter", "ok", found)


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_python,
    check_torch,
    check_triton,
    check_transformers,
    check_gpu,
    check_memory,
    check_disk,
    check_model,
    check_jupyter,
)


def check_package(machine: Machine, name: str, oldest: str, too_new: str | None = None) -> Finding:
    """A package: installed, importable, in its range."""
    version = machine.versions.get(name)
    if version is None:
        return Finding(name, "fail", "not installed", INSTALL)
    if name in machine.broken:
        advice = "run `make clean`, then `make lab`"
        return Finding(name, "fail", f"{version} does not import: {machine.broken[name]}", advice)
    if numbers(version) < numbers(oldest):
        return Finding(name, "fail", version, f"{oldest} or newer is needed: {INSTALL}")
    if too_new is not None and numbers(version) >= numbers(too_new):
        return Finding(name, "fail", version, f"a version below {too_new} is needed: {INSTALL}")
    return Finding(name, "ok", version)


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
    """Name, memory and architecture of the first GPU, and the number of others."""
    first = gpus[0]
    text = f"{first.name}, {first.memory_gib:.0f} GiB"
    if first.capability is not None:
        text += f", sm_{first.capability[0]}{first.capability[1]}"
    return text + (f" (and {len(gpus) - 1} more)" if len(gpus) > 1 else "")


def table(findings: list[Finding]) -> str:
    """The findings as text, each with its advice below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"      {'':<{width}}  → {finding.advice}")
    return "\n".join(lines)


def doctor() -> bool:
    """Check this machine and print the table. True if nothing failed: `assert doctor()` in a notebook."""
    findings = diagnose(gather())
    print(table(findings))
    return passed(findings)


def passed(findings: list[Finding]) -> bool:
    """Whether no check failed; warnings don't count."""
    return all(finding.status != "fail" for finding in findings)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore doctor`."""
    parser = subparsers.add_parser("doctor", help="check this machine: what is there, what is missing, what to do")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """`labcore doctor`: exit status 1 if a check failed."""
    findings = diagnose(gather())
    if arguments.json:
        print(json.dumps({"ok": passed(findings), "rows": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(table(findings))
    return 0 if passed(findings) else 1
