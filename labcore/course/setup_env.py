"""Set labcore up on a bare machine, then do what was asked: behind `make lab` and `make test`, and usable without make.

    python labcore/course/setup_env.py lab          (Windows: py labcore\\course\\setup_env.py lab)

Standard library only, since it runs before anything is installed. One road for every command:

    Python >= 3.10  →  .venv  →  packages at the pins of requirements.lock  →  model  →  JupyterLab, or pytest
                       `------- done once; a stamp in .venv says so -------'

Every failure ends in one line that says what to do. Built for the reader who has never set up a Python project.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST_PYTHON = (3, 10)
FIRST_PORT, LAST_PORT = 8888, 8937
NEEDED_GB = 3.0  # the environment on a CPU; the GPU build of torch on Linux takes about 5 more, which only pip can know
COMMANDS = ("install", "fetch", "lab", "test", "test-fast", "notebooks", "lint")


class SetupError(Exception):
    """Something that the reader has to mend. The message is one line: what happened — what to do."""


# ---------------------------------------------------------------------------------------------------- the environment


def venv_python(venv: Path) -> Path:
    """The interpreter of the environment `venv`."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint() -> str:
    """What the environment was made from. It changes with the pins, the project's metadata and the project's place."""
    made_from = hashlib.sha256(str(ROOT).encode())
    for name in ("requirements.lock", "pyproject.toml"):
        made_from.update((ROOT / name).read_bytes())
    return made_from.hexdigest()


def ensure_installed(venv: Path, python: str = sys.executable, wanted_python: str = "") -> None:
    """Make `venv` hold labcore and every pinned package; does nothing, at once, if a stamp says that it does.

    The stamp is the last thing written, so an installation that failed or was killed is never taken for a good one; an
    environment that never got that far is started over.
    """
    stamp, unfinished = venv / "labcore-installed", venv / "labcore-unfinished"
    if venv_python(venv).exists():
        check_version_of(venv, wanted_python)
        if stamp.exists() and stamp.read_text() == fingerprint():
            return
    check_disk(venv)
    if unfinished.exists() or not venv_python(venv).exists():
        say(f"making a Python environment in {short(venv)}")
        make_venv(venv, python)
        unfinished.touch()
    stamp.unlink(missing_ok=True)
    say("installing the packages (minutes the first time)")
    pip_install(venv, "-r", "requirements.lock")
    pip_install(venv, "--no-deps", "--no-build-isolation", "-e", ".")
    check_imports(venv)
    keep_jupyter_quiet(venv)
    unfinished.unlink(missing_ok=True)
    write_whole(stamp, fingerprint())


def check_version_of(venv: Path, wanted_python: str = "") -> None:
    """Refuse an existing environment whose Python is too old, or is not the one that PYTHON=… asks for."""
    text = (venv / "pyvenv.cfg").read_text() if (venv / "pyvenv.cfg").exists() else ""
    found = re.search(r"^version\s*=\s*(\d+)\.(\d+)", text, re.MULTILINE)
    if not found:
        return
    has = (int(found[1]), int(found[2]))
    if has < OLDEST_PYTHON or (wanted_python and has != sys.version_info[:2]):
        wants = "3.10 or newer" if has < OLDEST_PYTHON else f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{short(venv)} holds Python {has[0]}.{has[1]}, {wants} is wanted — run `make clean`, then the same again."
        )


def check_disk(venv: Path) -> None:
    """Refuse to begin what can't fit."""
    place = venv
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < NEEDED_GB and not (venv / "labcore-installed").exists():
        raise SetupError(
            f"{free:.1f} GB free on the disk of {short(venv)}; the packages need {NEEDED_GB:g} GB, and 5 GB more with torch's "
            "GPU build — free some, or put the environment elsewhere (VENV=/path/on/a/bigger/disk)."
        )


def make_venv(venv: Path, python: str = sys.executable) -> None:
    """Create `venv` anew with `python`'s own venv module."""
    done = subprocess.run([python, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(explain_venv(done.stdout + done.stderr))


def explain_venv(output: str) -> str:
    """The one line for a failed `python -m venv`, from what it printed."""
    if "ensurepip" in output or "No module named venv" in output:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return (
            f"this Python {version} came without its venv module — install it (Debian and Ubuntu: the package "
            f"python{version}-venv), or use another Python: PYTHON=/path/to/python3."
        )
    if no_space(output):
        return "no space left on the disk — free about 3 GB, or put the environment elsewhere (VENV=…), then run the same again."
    return f"the Python environment could not be made ({last_line(output)}) — mend that, then run the same again."


def pip_install(venv: Path, *arguments: str) -> None:
    """`pip install` in the environment, its progress shown; a failure becomes one line, the details stay in a log."""
    log = venv / "labcore-pip.log"
    log.unlink(missing_ok=True)
    command = [venv_python(venv), "-m", "pip", "--disable-pip-version-check", "--log", log, "install", *arguments]
    code = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment(venv)).returncode
    if code:
        output = log.read_text(errors="replace") if log.exists() else ""
        raise SetupError(explain_pip(output, short(log)))


def explain_pip(output: str, log: str) -> str:
    """The one line for a failed `pip install`, from its log.

    The order matters: a dead network also makes pip say that a package does not exist, and a full disk looks like a
    broken download.
    """
    again = "then run the same command again; what was already downloaded is kept."
    if no_space(output):
        return (
            "no space left while installing: about 3 GB are needed, 5 GB more with torch's GPU build — free some on this disk "
            f"and in the temp folder (TMPDIR), {again}"
        )
    if re.search(r"connection broken by|NewConnectionError|Name or service not known|name resolution|getaddrinfo failed"
                 r"|ConnectTimeout|ConnectionRefused|ProxyError|Max retries exceeded|Network is unreachable", output):
        return f"the package index can't be reached — check the network and the proxy settings, {again}"
    if re.search(r"CERTIFICATE_VERIFY_FAILED|SSLError", output):
        return f"the package index was reached, but its certificate is not trusted — set PIP_CERT to your network's certificate, {again}"
    if re.search(r"DO NOT MATCH THE HASHES|IncompleteRead|Read timed out|BadZipFile|is not a zip|invalid wheel"
                 r"|Connection aborted|Connection reset", output, re.IGNORECASE):
        return f"a download arrived broken — empty pip's cache (`python -m pip cache purge`), {again}"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return (
            f"there is no {missing[1]} for Python {version} on this machine ({sys.platform}, {platform.machine()}) — use a Python from 3.10 to "
            "3.13 of 64 bits: PYTHON=/path/to/python3."
        )
    if "Permission denied" in output:
        return f"no permission to write the environment — make this folder yours, or choose another place (VENV=…), {again}"
    return f"installing the packages failed ({last_line(output)}) — the whole story is in {log}; mend it, {again}"


def check_imports(venv: Path) -> None:
    """An installed package is not yet a working one: import those that everything rests on."""
    code = "import labcore, torch, transformers, jupyterlab, ipykernel"
    done = subprocess.run([str(venv_python(venv)), "-c", code], capture_output=True, text=True, env=environment(venv))
    if done.returncode:
        raise SetupError(
            f"installed, but it does not import ({last_line(done.stderr)}) — run `make clean`, then the same again; "
            "if it stays, it is the machine's: see Troubleshooting in README.md."
        )


def keep_jupyter_quiet(venv: Path) -> None:
    """No news pop-up and no update check in a class without a network."""
    settings = {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"}}
    folder = venv / "share/jupyter/lab/settings"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "overrides.json", json.dumps(settings, indent=2) + "\n")


def environment(venv: Path) -> dict[str, str]:
    """The variables that a program in the environment runs under.

    Its kernels come first: a reader who has a `python3` kernel of their own, or JUPYTER_PATH set, still gets ours.
    """
    inherited = dict(os.environ)
    for name in ("PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        inherited.pop(name, None)
    ours = {
        "VIRTUAL_ENV": str(venv),
        "PATH": os.pathsep.join([str(venv_python(venv).parent), inherited.get("PATH", "")]),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_PATH": os.pathsep.join(filter(None, [str(venv / "share/jupyter"), inherited.get("JUPYTER_PATH")])),
    }
    return {**inherited, **ours}


# ------------------------------------------------------------------------------------------------------- the commands


def run(venv: Path, *arguments: str) -> int:
    """Run the environment's Python in the project's folder; its exit status."""
    return subprocess.run([str(venv_python(venv)), *arguments], cwd=ROOT, env=environment(venv)).returncode


def fetch(venv: Path) -> int:
    """Have the default model in the cache; `labcore fetch` says itself what went wrong."""
    return run(venv, "-m", "labcore.cli", "fetch")


def lab(venv: Path, port: str = "", browser: str = "", token: str = "") -> int:
    """Start JupyterLab on notebook 00, on this machine only, and print its address. Does not return on POSIX."""
    number = free_port(port)
    token = token or secrets.token_hex(16)
    quiet = browser.lower() in ("no", "none", "off", "false", "0")
    command = [
        str(venv_python(venv)), "-m", "jupyterlab",
        f"--ServerApp.root_dir={ROOT}",
        f"--ServerApp.port={number}",
        "--ServerApp.port_retries=0",
        "--ServerApp.answer_yes=True",
        "--ServerApp.log_level=WARN",
        f"--ServerApp.open_browser={not quiet}",
        "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb",
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    # The token goes through the environment: a command line can be read by everyone on the machine.
    variables = {**environment(venv), "JUPYTER_TOKEN": token}
    say(f"JupyterLab (Ctrl-C stops it): http://localhost:{number}/lab/tree/notebooks/00_start_here.ipynb?token={token}")
    os.chdir(ROOT)
    if os.name == "nt":
        return subprocess.run(command, env=variables).returncode
    os.execve(command[0], command, variables)


def free_port(wanted: str = "") -> int:
    """The port that was asked for, if it is free, or else the first free one from 8888 up."""
    if not wanted:
        for port in range(FIRST_PORT, LAST_PORT + 1):
            if is_free(port):
                return port
        raise SetupError(f"no free port from {FIRST_PORT} to {LAST_PORT} — choose one: PORT=9000.")
    if not wanted.isdigit() or not 1 <= int(wanted) <= 65535:
        raise SetupError(f"PORT is {wanted!r}; it must be a whole number from 1 to 65535 — for example PORT=8890.")
    if not is_free(int(wanted)):
        raise SetupError(f"port {wanted} is taken — stop what runs there, or choose another: PORT={int(wanted) % 65535 + 1}.")
    return int(wanted)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of this machine."""
    with socket.socket() as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def notebooks(venv: Path) -> int:
    """Run every notebook in order and store its outputs; a notebook that fails is left as it was."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        say(path.name)
        code = run(
            venv, "-m", "nbconvert", "--log-level=WARN", "--to=notebook", "--execute", "--inplace",
            "--ExecutePreprocessor.kernel_name=python3", "--ExecutePreprocessor.record_timing=False",
            "--ExecutePreprocessor.store_widget_state=False", "--ExecutePreprocessor.coalesce_streams=True",
            f"notebooks/{path.name}",
        )  # fmt: skip
        if code:
            raise SetupError(f"{path.name} stopped at the error above and was left as it was — mend the cell, then run the same again.")
    return 0


def test(venv: Path) -> int:
    """Every test and every stored notebook output, in one pytest run whose closing line is the last thing printed."""
    return run(venv, "-m", "pytest", "--nbval", "--nbval-current-env", "tests", "notebooks")


def test_fast(venv: Path) -> int:
    """The tests that take seconds: no model, no browser, nothing slow."""
    return run(venv, "-m", "pytest", "tests", "-m", "not slow and not model and not browser")


# --------------------------------------------------------------------------------------------------------- small parts


def say(text: str) -> None:
    """One line of progress. Errors look the same and begin with `labcore: error:`."""
    print(f"labcore: {text}", flush=True)


def short(path: Path) -> str:
    """A path as the reader would type it: from the project's folder, where it lies inside."""
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def no_space(output: str) -> bool:
    """Whether a program's output says that the disk is full."""
    return bool(re.search(r"No space left on device|Errno 28|not enough space on the disk|Disk quota exceeded", output))


def last_line(output: str) -> str:
    """The last line with words in it, without pip's time stamps."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return re.sub(r"^\d{4}-\d\d-\d\dT[\d:,]+ +", "", lines[-1])[:200] if lines else "it said nothing"


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there in full or not at all."""
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    os.replace(half, path)


def main(arguments: list[str] | None = None) -> int:
    """Set up what is missing, then carry out one command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Set labcore up, then do what was asked.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--venv", default="", help="where the environment goes (default: .venv in the project's folder)")
    parser.add_argument("--python", default="", help="what PYTHON= said, if anything: an existing environment must match it")
    parser.add_argument("--port", default="", help="lab: the port (default: the first free one from 8888 up)")
    parser.add_argument("--browser", default="", help="lab: `no` opens none")
    parser.add_argument("--token", default="", help="lab: the token in the address (default: a random one)")
    asked = parser.parse_args(arguments)
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError("this is Python %d.%d; 3.10 or newer is needed — install one and use it here." % sys.version_info[:2])
    venv = ROOT / (asked.venv or ".venv")
    ensure_installed(venv, wanted_python=asked.python)
    if asked.command in ("fetch", "lab", "test", "notebooks") and fetch(venv):
        return 1
    if asked.command == "lab":
        return lab(venv, asked.port, asked.browser, asked.token)
    if asked.command == "lint":
        return run(venv, "-m", "ruff", "check")
    return {"test": test, "test-fast": test_fast, "notebooks": notebooks}.get(asked.command, lambda _: 0)(venv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        print(f"labcore: error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"labcore: error: {error} — mend that, then run the same command again.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nlabcore: stopped.", file=sys.stderr)
        sys.exit(130)
