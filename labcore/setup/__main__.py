"""The commands of the Makefile: `python -m labcore.setup lab`, `… test`, and so on.

Each command except `clean` first installs what is missing (environment.py), so it works on a bare machine.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from labcore.setup.clean import clean
from labcore.setup.environment import OLDEST_PYTHON, ROOT, ensure_installed, environment, say, venv_python
from labcore.setup.explain import SetupError, explain_os

FIRST_PORT, LAST_PORT = 8888, 8937
START = "lab/tree/notebooks/00_start_here.ipynb"


def install(asked: argparse.Namespace) -> int:
    """Create the environment and install its packages, if that is not done yet."""
    ensure_installed(asked.venv, asked.python)
    return 0


def lab(asked: argparse.Namespace) -> int:
    """Start JupyterLab on notebook 00, bound to localhost, and print its URL.

    On POSIX the process is replaced by the server (exec), so signals reach it directly.
    """
    port = choose_port(asked.port)
    token = asked.token or secrets.token_hex(16)
    command = [
        str(venv_python(asked.venv)),
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={ROOT}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.answer_yes=True",
        "--ServerApp.log_level=ERROR",  # keeps the URL visible
        "--LabApp.log_level=ERROR",
        f"--ServerApp.open_browser={asked.browser.lower() not in ('no', 'none', 'off', 'false', '0')}",
        f"--LabApp.default_url=/{START}",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    # Passed through the environment: other users of the machine can read a command line.
    variables = {**environment(asked.venv), "JUPYTER_TOKEN": token}
    say(f"JupyterLab is starting; Ctrl-C stops it. Its address: http://localhost:{port}/{START}?token={token}")
    os.chdir(ROOT)
    if os.name == "nt":
        return subprocess.run(command, env=variables).returncode
    os.execve(command[0], command, variables)


def choose_port(wanted: str = "") -> int:
    """The requested port if it is free; by default the first free port from 8888 up. Raises SetupError."""
    if not wanted:
        free = next(filter(is_free, range(FIRST_PORT, LAST_PORT + 1)), None)
        if free is None:
            raise SetupError(f"no port is free from {FIRST_PORT} to {LAST_PORT} — choose another: PORT=9000.")
        return free
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 65535:
        raise SetupError(f"PORT is {wanted!r}; it must be a whole number from 1 to 65535 — for example PORT=8890.")
    if not is_free(int(wanted)):
        raise SetupError(f"port {wanted} is taken — stop what runs there, or choose another, for example PORT=9000.")
    return int(wanted)


def is_free(port: int) -> bool:
    """Whether a server can bind to this port on localhost."""
    with socket.socket() as probe:
        if os.name != "nt":  # on Windows the option allows two servers on one port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def fetch(asked: argparse.Namespace) -> int:
    """Download the default model if it is not cached. `labcore fetch` reports progress and errors."""
    return run(asked.venv, "-m", "labcore.cli.main", "fetch")


SIDE_BY_SIDE = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadfile")
"""pytest-xdist: a worker a core, at most 4 (memory). A file runs on one worker: a notebook's cells depend on each other."""


def test(asked: argparse.Namespace) -> int:
    """Run all tests and compare all stored notebook outputs, in one pytest run.

    Skipped tests are listed with their reasons. BROWSER_TESTS=install downloads a Chromium where there is none; otherwise
    nothing is installed outside the environment.
    """
    return run(asked.venv, "-m", "pytest", "-rs", *SIDE_BY_SIDE, "--nbval", "--nbval-current-env", "tests", "notebooks")


def test_fast(asked: argparse.Namespace) -> int:
    """Run the fast tests: no model, no browser, none marked slow."""
    return run(asked.venv, "-m", "pytest", *SIDE_BY_SIDE, "tests", "-m", "not slow and not model and not browser")


def notebooks(asked: argparse.Namespace) -> int:
    """Run every notebook in order and store its outputs. Stops at the first failure and leaves that file unchanged."""
    return run(asked.venv, "-m", "labcore.cli.main", "course", "run")


def lint(asked: argparse.Namespace) -> int:
    """Run ruff over the package and the tests."""
    return run(asked.venv, "-m", "ruff", "check")


def run(venv: Path, *arguments: str) -> int:
    """Run the environment's Python in the project folder; returns its exit status."""
    return subprocess.run([str(venv_python(venv)), *arguments], cwd=ROOT, env=environment(venv)).returncode


def remove(asked: argparse.Namespace) -> int:
    """Delete the environment and the tools' caches. Raises SetupError outside the project folder."""
    if not os.path.samefile(os.curdir, ROOT):  # an installed labcore can be run from any folder
        raise SetupError(f"this folder is not the course's — run `make clean` in {ROOT}, if that is what you want to clean.")
    clean(asked.venv)
    other = os.environ.get("VENV", "")
    if other and venv_path(other) != asked.venv:
        say(f"the VENV of the shell's environment was left alone; to delete it: make clean VENV={shlex.quote(other)}")
    return 0


COMMANDS = {
    "install": [install],
    "fetch": [install, fetch],
    "lab": [install, fetch, lab],
    "test": [install, fetch, test],
    "test-fast": [install, test_fast],
    "notebooks": [install, fetch, notebooks],
    "lint": [install, lint],
    "clean": [remove],
}


def main(arguments: list[str] | None = None) -> int:
    """Run the steps of one command; returns the first nonzero exit status, or 0."""
    parser = argparse.ArgumentParser(prog="python -m labcore.setup", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--venv", default="", help="where the environment goes (default: .venv here)")
    parser.add_argument("--python", default="", help="the value of PYTHON=; an existing environment must match it")
    parser.add_argument("--port", default="", help="of JupyterLab (default: the first free one from 8888 up)")
    parser.add_argument("--browser", default="", help="`no`: JupyterLab opens none")
    parser.add_argument("--token", default="", help="of JupyterLab (default: a random one)")
    asked = parser.parse_args(arguments)
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(f"this is Python {sys.version.split()[0]}; 3.10 or newer is needed — install it, use it here.")
    if not (ROOT / "requirements.lock").is_file():
        raise SetupError(f"{ROOT} is not the course's folder — run this in the folder that the course was cloned into.")
    asked.venv = venv_path(asked.venv)
    for step in COMMANDS[asked.command]:
        if status := step(asked):
            return status
    return 0


def venv_path(asked: str) -> Path:
    """The environment's folder: VENV= with `~` expanded, by default `.venv` in the project."""
    expanded = os.path.expanduser(asked or ".venv")
    if expanded.startswith("~"):
        raise SetupError(f"VENV is {asked!r}, and {expanded.split('/')[0]} has no home folder here — write the whole path.")
    return ROOT / expanded


def main_with_plain_errors() -> int:
    """Run `main` and print any failure as one line."""
    try:
        return main()
    except (SetupError, OSError) as error:
        message = explain_os(error) if isinstance(error, OSError) else str(error)
        message = message.replace("\n", "\\n")  # a path may contain a line break
        print(f"labcore: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlabcore: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main_with_plain_errors())
