"""From a bare machine to an environment that holds labcore and every pinned package.

    Python >= 3.10  →  .venv  →  the pins of requirements.lock  →  labcore itself  →  stamp

The stamp is written last, so an installation that failed or was killed is never taken for a good one. It names what the
environment was made from, so new pins are installed by the same command. A folder that holds anything and was not made by
labcore (ownership.py) is refused: nothing in it is touched.
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
from labcore.setup.explanations import NEEDED_GB, SetupError, explain_import, explain_pip, explain_venv
from labcore.setup.ownership import STAMP, UNFINISHED, empty, mark, why_not_ours

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 10)
LOG = "labcore-pip.log"


def ensure_installed(venv: Path, wanted_python: str = "") -> None:
    """Make `venv` hold labcore and its packages; at once if the stamp says that it does. Raises `SetupError`.

    wanted_python    what the reader said with PYTHON=, if anything: an existing environment must be of that version
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
    """Raise `SetupError` if `venv` exists, holds anything, and is not an environment that labcore made."""
    if os.path.lexists(venv) and (reason := why_not_ours(venv, ROOT, or_empty=True)):
        raise SetupError(f"{short(venv)} {reason}, so nothing in it was touched — name a new or empty folder: VENV=/path.")


def is_ready(venv: Path, wanted_python: str) -> bool:
    """Whether `venv` is installed. Raises `SetupError` if it has the wrong Python."""
    if not venv_python(venv).exists():
        return False
    check_version_of(venv, wanted_python)
    return is_installed(venv)


def install(venv: Path) -> None:
    """Make the environment, unless it is whole, and install everything into it. The caller holds its lock."""
    if (venv / UNFINISHED).exists() or not venv_python(venv).exists():
        say(f"making a Python environment in {short(venv)}")
        make_venv(venv)
    mark(venv)  # an environment from before there was a marker loses its other mark now
    (venv / STAMP).unlink(missing_ok=True)
    say("installing the packages: a few minutes, the first time only")
    pip_install(venv, "-r", "requirements.lock")
    pip_install(venv, "--no-deps", "--no-build-isolation", "-e", ".")
    check_imports(venv)
    keep_jupyter_quiet(venv)
    (venv / UNFINISHED).unlink(missing_ok=True)
    write_whole(venv / STAMP, fingerprint())


def is_installed(venv: Path) -> bool:
    """Whether the stamp is there and names today's pins."""
    stamp = venv / STAMP
    return stamp.exists() and stamp.read_text() == fingerprint()


def fingerprint() -> str:
    """What an environment is made from: the pins, the project's metadata, and where the project lies."""
    made_from = hashlib.sha256(str(ROOT).encode())
    for name in ("requirements.lock", "pyproject.toml"):
        made_from.update((ROOT / name).read_bytes())
    return made_from.hexdigest()


def check_version_of(venv: Path, wanted_python: str = "") -> None:
    """Refuse an existing environment whose Python is too old, or is not the one that PYTHON= asks for."""
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
    """Refuse to begin what can't fit."""
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
    """Create `venv` anew in its folder, marked as labcore's and as unfinished; what an earlier try left goes first."""
    empty(venv)
    mark(venv)
    (venv / UNFINISHED).touch()
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(explain_venv(done.stdout + done.stderr))


def pip_install(venv: Path, *arguments: str) -> None:
    """`pip install` into the environment, all its output shown; what it says at length goes to a log."""
    log = venv / LOG
    log.unlink(missing_ok=True)
    command = [str(venv_python(venv)), "-m", "pip", "--disable-pip-version-check", "--log", str(log)]
    command += ["install", *arguments]
    # Warnings and errors pass through our hands, since a full disk holds no log; progress bars go straight on.
    pipe = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    complaints = []
    with subprocess.Popen(command, cwd=ROOT, env=environment(venv), **pipe) as pip:
        for line in pip.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            complaints.append(line)
    if pip.returncode:
        raise SetupError(explain_pip(pip.returncode, "".join(complaints), short(log)))


def check_imports(venv: Path) -> None:
    """An installed package is not yet a working one: import those that everything rests on."""
    code = "import labcore, torch, transformers, jupyterlab, ipykernel"
    command = [str(venv_python(venv)), "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(venv))
    if done.returncode:
        raise SetupError(explain_import(done.stderr, clean_command(venv)))


def keep_jupyter_quiet(venv: Path) -> None:
    """No pop-up that asks for news, and no look for updates, in a class without a network."""
    settings = {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"}}
    folder = venv / "share/jupyter/lab/settings"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "overrides.json", json.dumps(settings, indent=2) + "\n")


def environment(venv: Path) -> dict[str, str]:
    """The variables for a program that runs in `venv`.

    Its Jupyter kernels come first: a reader with a `python3` kernel of their own, or JUPYTER_PATH set, still gets ours.
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
    """What to type to have `venv` deleted."""
    return "make clean" if venv == ROOT / ".venv" else f"make clean VENV={shlex.quote(short(venv))}"


def short(path: Path) -> str:
    """A path as the reader would type it: from the project's folder, where it lies inside."""
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there in full or not at all."""
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    os.replace(half, path)


def say(text: str) -> None:
    """One line of progress."""
    print(f"labcore: {text}", flush=True)
