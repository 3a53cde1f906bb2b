"""Facts about this machine, gathered without raising. `doctor.report` interprets them."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "jupyterlab", "ipykernel")
GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. capability: (8, 6) for sm_86; None if neither torch nor the driver reports it."""

    name: str
    memory_gib: float
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Machine:
    """The facts found by `gather`. None: not present, or not reported by the system."""

    system: str  # "Linux", "Darwin", "Windows"
    python: tuple[int, int, int]
    bits: int  # 32 or 64
    versions: dict[str, str]  # of those PACKAGES that are installed
    broken: dict[str, str]  # why an installed package does not import
    torch_cuda: str | None  # the CUDA version that torch was built for; None for a CPU build
    torch_sees_gpu: bool  # whether torch can compute on a GPU here
    torch_needs_triton: str | None  # the one version that this build of torch asks for
    gpus: tuple[Gpu, ...]  # what torch sees, else what the driver reports
    driver: str | None  # its version, "535.104.05"
    driver_cuda: tuple[int, int] | None  # the newest CUDA version that the driver serves
    hidden_by: str | None  # CUDA_VISIBLE_DEVICES
    c_compiler: bool  # whether Triton could build the launcher of a kernel
    memory_gib: float | None  # in a container, what the container may use
    memory_free_gib: float | None
    disk_free_gib: float | None  # where the fetched model is kept
    model_cached: bool  # whether the default model is there
    kernel: str | None  # whose Python the Jupyter kernel `python3` runs: "ours" or "other"


def gather() -> Machine:
    """Inspect this machine. Never raises: unknown facts are None, packages that don't import are in `broken`."""
    broken: dict[str, str] = {}
    torch = try_import("torch", broken)
    for name in ("triton", "transformers"):
        try_import(name, broken)
    torch_cuda = getattr(getattr(torch, "version", None), "cuda", None)
    sees_gpu, gpus = gpus_by_torch(torch)
    total, free = memory()
    return Machine(
        system=platform.system(),
        python=sys.version_info[:3],
        bits=64 if sys.maxsize > 2**32 else 32,
        versions={name: version for name in PACKAGES if (version := version_of(name)) is not None},
        broken=broken,
        torch_cuda=torch_cuda,
        torch_sees_gpu=sees_gpu,
        torch_needs_triton=needed_triton(),
        gpus=gpus or gpus_by_driver(),
        driver=driver_version(),
        driver_cuda=driver_cuda(),
        hidden_by=os.environ.get("CUDA_VISIBLE_DEVICES"),
        c_compiler=has_c_compiler(),
        memory_gib=total,
        memory_free_gib=free,
        disk_free_gib=disk_free(),
        model_cached=model_cached(),
        kernel=kernel(),
    )


def version_of(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def try_import(package: str, broken: dict[str, str]) -> object | None:
    """Import a package; if it is installed and does not import, note why in `broken`."""
    if version_of(package) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return __import__(package)
    except Exception as error:  # a missing library, a wrong binary, a half-removed package: all of it is a finding
        broken[package] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else '-'}"
        return None


def needed_triton() -> str | None:
    """The one version of Triton that the installed torch was made with, from torch's own metadata."""
    if version_of("torch") is None:
        return None
    for requirement in importlib.metadata.requires("torch") or []:
        exact = re.match(r"triton\s*==\s*([\d.]+)", requirement)
        if exact:
            return exact[1]
    return None


def gpus_by_torch(torch: object | None) -> tuple[bool, tuple[Gpu, ...]]:
    """Whether torch can use a GPU, and those that it sees."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old driver makes torch warn; the doctor says it better
            if not torch.cuda.is_available():
                return False, ()
            properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception:
        return False, ()
    return True, tuple(Gpu(p.name, p.total_memory / GIB, (p.major, p.minor)) for p in properties)


def gpus_by_driver() -> tuple[Gpu, ...]:
    """The GPUs that the driver's own tool lists; it also works where torch does not."""
    for query in ("name,memory.total,compute_cap", "name,memory.total"):  # old drivers don't know compute_cap
        gpus = parse_gpus(output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"))
        if gpus:
            return gpus
    return ()


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """Lines of `name, 15360 MiB[, 7.5]`; a line that looks otherwise (an error message) is no GPU."""
    gpus = []
    for line in listing.splitlines():
        parts = re.fullmatch(r"(.+?), (\d+) MiB(?:, (\d+)\.(\d+))?", line.strip())
        if parts:
            capability = (int(parts[3]), int(parts[4])) if parts[3] else None
            gpus.append(Gpu(parts[1], int(parts[2]) / 1024, capability))
    return tuple(gpus)


def driver_version() -> str | None:
    """The version of the NVIDIA driver: from the kernel on Linux, else from the driver's tool."""
    proc = Path("/proc/driver/nvidia/version")
    text = proc.read_text(errors="replace") if proc.exists() else ""
    text = text or output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, from the driver's library; needs no GPU."""
    version = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def has_c_compiler() -> bool:
    """Whether Triton can compile a kernel's launcher, which needs a C compiler and Python.h."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    return bool(compiler) and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def memory() -> tuple[float | None, float | None]:
    """Total and available memory, GiB; in a container, what the container may use."""
    try:
        from labcore.kvcache.host_memory import host_memory

        found = host_memory()
    except Exception:
        return None, None
    return found.total / GIB, found.available / GIB


def disk_free() -> float | None:
    """Free space where the fetched model is kept, GiB."""
    try:
        from labcore.models.download import cache_folder

        place = cache_folder()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free / GIB
    except Exception:
        return None


def model_cached() -> bool:
    """Whether the default model can be loaded without a network."""
    try:
        from labcore.models.download import is_cached

        return is_cached()
    except Exception:
        return False


def kernel() -> str | None:
    """Which Python the kernel `python3` starts when JupyterLab runs in this environment: "ours" or "other"."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager

        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except Exception:
        return None
    if Path(program).name == program:  # a bare `python`: Jupyter puts its own in
        return "ours"
    ours = os.path.normcase(os.path.abspath(os.path.dirname(sys.executable)))
    return "ours" if os.path.normcase(os.path.abspath(os.path.dirname(program))) == ours else "other"


def output_of(*command: str) -> str:
    """A program's stdout; empty if it is missing or takes longer than 10 s."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
