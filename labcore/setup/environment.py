"""Create the virtual environment with labcore and every pinned package.

    Python >= 3.10  →  .venv  →  the pins of requirements.lock  →  labcore itself  →  stamp

The stamp is written last, so a failed or killed installation is not mistaken for a complete one. It holds a hash of the
pins and metadata, so changed pins are installed by the same command. A non-empty folder that labcore did not create
(ownership.py) is rejected and left unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from labcore.files.folder_lock import folder_lock
from labcore.setup.explain import NEEDED_GB, SetupError, explain_import, explain_pip, explain_venv
from labcore.setup.ownership import STAMP, UNFINISHED, empty, mark, why_not_ours

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 10)
LOG = "labcore-pip.log"


def ensure_installed(venv: Path, wanted_python: str = "") -> None:
    """Install labcore and its packages into `venv`; returns at once if the stamp is current. Raises `SetupError`.

    wanted_python    the value of PYTHON=, if given: an existing environment must have this version
    """
    refuse_foreign(venv)
    if is_ready(venv, wanted_python):
        return
    if not venv_python(venv).exists():
        check_disk(venv)
    venv.mkdir(parents=True, exist_ok=True)
    with folder_lock(venv, lambda: say(f"another process is setting up {short(venv)}; waiting for it")):
        refuse_foreign(venv)
        if not is_ready(venv, wanted_python):
            install(venv)


def refuse_foreign(venv: Path) -> None:
    """Raise `SetupError` if `venv` is a non-empty folder that labcore did not create."""
    if os.path.lexists(venv) and (reason := why_not_ours(venv, ROOT, or_empty=True)):
        raise SetupError(f"{short(venv)} {reason}, so nothing in it was touched — name a new or empty folder: VENV=/path.")


def is_ready(venv: Path, wanted_python: str) -> bool:
    """Whether `venv` is completely installed. Raises `SetupError` if it has the wrong Python version."""
    if not venv_python(venv).exists():
        return False
    check_version_of(venv, wanted_python)
    return is_installed(venv)


def install(venv: Path) -> None:
    """Create the environment unless it is complete, and install everything. The caller holds the lock."""
    if (venv / UNFINISHED).exists() or not venv_python(venv).exists():
        say(f"making a Python environment in {short(venv)}")
        make_venv(venv)
    mark(venv)  # older environments have no marker, and their stamp is deleted next
    (venv / STAMP).unlink(missing_ok=True)
    say("installing the packages: a few minutes, the first time only")
    pip_install(venv, "-r", "requirements.lock")
    pip_install(venv, "--no-deps", "--no-build-isolation", "-e", ".")
    check_imports(venv)
    keep_jupyter_quiet(venv)
    (venv / UNFINISHED).unlink(missing_ok=True)
    write_whole(venv / STAMP, fingerprint())


def is_installed(venv: Path) -> bool:
    """Whether the stamp exists and matches the current pins."""
    stamp = venv / STAMP
    return stamp.exists() and stamp.read_text() == fingerprint()


def fingerprint() -> str:
    """A hash of the pins, the project metadata and the project's path."""
    made_from = hashlib.sha256(str(ROOT).encode())
    for name in ("requirements.lock", "pyproject.toml"):
        made_from.update((ROOT / name).read_bytes())
    return made_from.hexdigest()


def check_version_of(venv: Path, wanted_python: str = "") -> None:
    """Raise `SetupError` if the environment's Python is too old or differs from PYTHON=."""
    settings = venv / "pyvenv.cfg"
    found = re.search(r"^version\s*=\s*(\d+)\.(\d+)", settings.read_text(), re.MULTILINE) if settings.exists() else None
    if not found:
        return
    has = (int(found[1]), int(found[2]))
    ours = sys.version_info[:2]
    if has < OLDEST_PYTHON or (wanted_python and has != ours):
        wanted = "3.10 or newer" if has < OLDEST_PYTHON else f"{ours[0]}.{ours[1]}"
        raise SetupError(
            f"{short(venv)} holds Python {has[0]}.{has[1]}, wanted is {wanted} — run `{clean_command(venv)}`, then the "
            "same command again."
        )


def check_disk(venv: Path) -> None:
    """Raise `SetupError` if the disk has too little free space."""
    place = venv
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < NEEDED_GB:
        raise SetupError(
            f"{free:.1f} GB are free on the disk of {short(venv)}, {NEEDED_GB:g} GB are needed (5 GB more with torch's "
            "GPU build) — free some, or put the environment elsewhere: VENV=/path/on/a/bigger/disk."
        )


def make_venv(venv: Path) -> None:
    """Create `venv`, marked as labcore's and as unfinished. Remains of an earlier attempt are deleted first."""
    empty(venv)
    mark(venv)
    (venv / UNFINISHED).touch()
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(explain_venv(done.stdout + done.stderr))


def pip_install(venv: Path, *arguments: str) -> None:
    """Run `pip install` in the environment. Its output is shown; the verbose log goes to a file."""
    log = venv / LOG
    log.unlink(missing_ok=True)
    command = [str(venv_python(venv)), "-m", "pip", "--disable-pip-version-check", "--log", str(log)]
    command += ["install", *arguments]
    # stderr is read here as well, since a full disk holds no log; progress bars go to the terminal.
    pipe = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    complaints = []
    with subprocess.Popen(command, cwd=ROOT, env=environment(venv), **pipe) as pip:
        for line in pip.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            complaints.append(line)
    if pip.returncode:
        raise SetupError(explain_pip(pip.returncode, "".join(complaints), short(log)))


def check_imports(venv: Path) -> None:
    """Import the main packages in the environment. Raises `SetupError` if one does not import."""
    code = "import labcore, torch, transformers, jupyterlab, ipykernel"
    command = [str(venv_python(venv)), "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(venv))
    if done.returncode:
        raise SetupError(explain_import(done.stderr, clean_command(venv)))


def keep_jupyter_quiet(venv: Path) -> None:
    """Turn off JupyterLab's update check and news prompt, which need a network."""
    settings = {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"}}
    folder = venv / "share/jupyter/lab/settings"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "overrides.json", json.dumps(settings, indent=2) + "\n")


def environment(venv: Path) -> dict[str, str]:
    """Environment variables of a program that runs in `venv`.

    JUPYTER_PATH begins with the environment, so its `python3` kernel has precedence over a user's.
    """
    not_ours = ("PYTHONHOME", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in not_ours}
    before = {"PATH": venv_python(venv).parent, "JUPYTER_PATH": venv / "share/jupyter"}
    return {
        **inherited,
        **{name: os.pathsep.join(filter(None, [str(first), inherited.get(name)])) for name, first in before.items()},
        "VIRTUAL_ENV": str(venv),
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def venv_python(venv: Path) -> Path:
    """The interpreter of the environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def clean_command(venv: Path) -> str:
    """The command that deletes `venv`."""
    return "make clean" if venv == ROOT / ".venv" else f"make clean VENV={shlex.quote(short(venv))}"


def short(path: Path) -> str:
    """The path relative to the project folder if it is inside."""
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically."""
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    os.replace(half, path)


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"labcore: {text}", flush=True)
