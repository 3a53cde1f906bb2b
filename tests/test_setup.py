"""Setting up: each failure ends in one line that says what to do; half an environment is never taken for a whole one.

The environments here are stand-ins, a folder with a shell script for its Python; `make test` walks the real road.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from labcore.setup import __main__ as commands
from labcore.setup import environment as env
from labcore.setup.errors import SetupError, explain_import, explain_pip, explain_venv

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(os.name == "nt", reason="stands in with a shell script for a Python")

DEBIAN = """The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
package using the following command.
"""
REFUSED = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(<Connection>: Failed to \
establish a new connection: [Errno 111] Connection refused')': /simple/accelerate/
ERROR: Could not find a version that satisfies the requirement accelerate==1.15.0 (from versions: none)
ERROR: No matching distribution found for accelerate==1.15.0
"""
UNTRUSTED = """WARNING: Retrying (Retry(total=0)) after connection broken by 'SSLError(SSLCertVerificationError(1, \
'[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate in certificate chain'))': /simple/torch/
ERROR: No matching distribution found for torch==2.13.0
"""
NO_WHEEL = """ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0
"""
CUT_OFF = "ERROR: Exception:\npip._vendor.urllib3.exceptions.IncompleteRead: IncompleteRead(1 bytes read)\n"
DAMAGED = "ERROR: Wheel 'accelerate' located at accelerate-1.15.0-py3-none-any.whl is invalid.\n"
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("status", "output", "says"),
    [
        (1, REFUSED, "the package index can't be reached — check the network and the proxy settings"),
        (1, UNTRUSTED, "certificate that is not trusted — set PIP_CERT"),
        (1, NO_WHEEL, "there is no torch==2.13.0 for Python"),
        (2, CUT_OFF, "a download arrived broken — empty pip's cache"),
        (1, DAMAGED, "a download arrived broken — empty pip's cache"),
        (1, FULL, "no space left while installing"),
        (1, FULL + REFUSED, "no space left while installing"),
        (-9, "", "the installation was killed; too little memory is the usual reason"),
        (1, "ERROR: Permission denied: 'bin'\n", "no permission to write the environment"),
        (1, "WARNING: a\nERROR: something new\nWARNING: b\n", "failed (something new) — the whole story is in pip.log"),
        (1, "", "it did not say why"),
    ],
    ids=["no network", "untrusted", "no wheel", "cut off", "damaged", "full disk", "full disk and retries", "killed"]
    + ["no permission", "unknown", "silent"],
)
def test_a_failed_installation_is_explained_in_one_line(status, output, says):
    line = explain_pip(status, output, "pip.log")
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (DEBIAN, "came without its venv module — install it (on Debian and Ubuntu the package python3."),
        ("/usr/bin/python3: No module named venv", "came without its venv module"),
        ("Error: [Errno 28] No space left on device: 'lib'", "no space left on the disk"),
        ("Error: [Errno 13] Permission denied: '.venv'", "no permission to write here"),
        ("Error: Command 'ensurepip' returned non-zero exit status 1.", "non-zero exit status 1."),
    ],
)
def test_a_failed_environment_is_explained_in_one_line(output, says):
    line = explain_venv(output)
    assert says in line
    assert "\n" not in line


def test_packages_that_do_not_import_are_named():
    trace = "Traceback (most recent call last):\nImportError: libgomp.so.1: cannot open shared object file\n"
    assert "ImportError: libgomp.so.1" in explain_import(trace)


# ------------------------------------------------------------------------------------------------------ the environment


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder that holds only what an environment is made from."""
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(env, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def stand_in(project, monkeypatch) -> Path:
    """An environment whose `python` notes how it was called, then does what the file `behaviour` says."""
    venv = project / ".venv"

    def make(path: Path) -> None:
        (path / "bin").mkdir(parents=True, exist_ok=True)
        script = f'#!/bin/sh\necho "$@" >> {project}/calls\n. {project}/behaviour\n'
        (path / "bin/python").write_text(script)
        (path / "bin/python").chmod(0o755)
        (path / env.UNFINISHED).touch()
        with (project / "calls").open("a") as calls:
            calls.write("made\n")

    (project / "behaviour").write_text("exit 0\n")
    (project / "calls").write_text("")
    monkeypatch.setattr(env, "make_venv", make)
    return venv


def calls(venv: Path) -> list[str]:
    """What happened to the stand-in since the last look: the last word of each call."""
    file = venv.parent / "calls"
    lines = [line.split()[-1] for line in file.read_text().splitlines()]
    file.write_text("")
    return lines


@posix
def test_it_is_made_once_and_found_again(stand_in):
    env.ensure_installed(stand_in)
    assert calls(stand_in) == ["made", "requirements.lock", ".", "ipykernel"]
    env.ensure_installed(stand_in)
    assert calls(stand_in) == []


@posix
@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_it_is_brought_up_to_date_when_the_pins_or_the_project_change(stand_in, changed):
    env.ensure_installed(stand_in)
    calls(stand_in)
    (stand_in.parent / changed).write_text("something = 'else'\n")
    env.ensure_installed(stand_in)
    assert calls(stand_in) == ["requirements.lock", ".", "ipykernel"]


@posix
@pytest.mark.parametrize(
    "behaviour",
    ["echo 'ERROR: No space left on device' >&2; exit 1", "kill -9 $$", 'case "$*" in *import*) exit 1;; esac'],
    ids=["fails", "is killed", "does not import"],
)
def test_an_installation_that_did_not_end_well_leaves_no_stamp_and_is_started_over(stand_in, behaviour, capfd):
    (stand_in.parent / "behaviour").write_text(behaviour)
    with pytest.raises(SetupError):
        env.ensure_installed(stand_in)
    assert not env.is_installed(stand_in)
    (stand_in.parent / "behaviour").write_text("exit 0\n")
    calls(stand_in)
    env.ensure_installed(stand_in)
    assert calls(stand_in)[0] == "made"
    assert env.is_installed(stand_in)


@posix
def test_a_failed_update_is_tried_again_without_throwing_a_good_environment_away(stand_in, capfd):
    env.ensure_installed(stand_in)
    (stand_in.parent / "requirements.lock").write_text("torch==2.14.0\n")
    (stand_in.parent / "behaviour").write_text("exit 1\n")
    with pytest.raises(SetupError):
        env.ensure_installed(stand_in)
    (stand_in.parent / "behaviour").write_text("exit 0\n")
    calls(stand_in)
    env.ensure_installed(stand_in)
    assert "made" not in calls(stand_in)
    assert env.is_installed(stand_in)


@posix
def test_pips_complaints_are_shown_and_explained(stand_in, capfd):
    (stand_in.parent / "behaviour").write_text("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1")
    with pytest.raises(SetupError, match="no space left while installing"):
        env.ensure_installed(stand_in)
    assert "Errno 28" in capfd.readouterr().err


def test_an_environment_that_moved_with_its_project_is_installed_again(project, monkeypatch, tmp_path_factory):
    before = env.fingerprint()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(project / name, elsewhere)
    monkeypatch.setattr(env, "ROOT", elsewhere)
    assert env.fingerprint() != before


@pytest.mark.parametrize(
    ("holds", "wanted", "says"),
    [("3.9.18", "", "holds Python 3.9, wanted is 3.10 or newer — run `make clean`"), ("3.99.1", "x", "make clean")],
)
def test_an_environment_of_another_python_is_refused_not_replaced(project, holds, wanted, says):
    (project / ".venv").mkdir()
    (project / ".venv/pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {holds}\n")
    with pytest.raises(SetupError, match=says):
        env.check_version_of(project / ".venv", wanted)


def test_a_newer_python_in_the_environment_is_fine_if_none_was_asked_for(project):
    (project / ".venv").mkdir()
    (project / ".venv/pyvenv.cfg").write_text("version = 3.99.1\n")
    env.check_version_of(project / ".venv", "")
    assert (project / ".venv/pyvenv.cfg").exists()


def test_too_small_a_disk_is_refused_before_anything_is_downloaded(project, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(4e9, 3.5e9, 0.5e9))
    with pytest.raises(SetupError, match=r"0\.5 GB are free on the disk of \.venv, 3 GB are needed"):
        env.check_disk(project / ".venv")


@posix
def test_a_python_without_venv_is_named(project, monkeypatch):
    python = project / "python3"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{DEBIAN}END\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SetupError, match="came without its venv module"):
        env.make_venv(project / ".venv")


def test_its_kernels_come_before_everybody_elses(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_PATH", "/opt/shared/jupyter")
    monkeypatch.setenv("PYTHONHOME", "/usr")
    variables = env.environment(tmp_path)
    assert variables["JUPYTER_PATH"].split(os.pathsep) == [str(tmp_path / "share/jupyter"), "/opt/shared/jupyter"]
    assert variables["PATH"].split(os.pathsep)[0] == str(env.venv_python(tmp_path).parent)
    assert "PYTHONHOME" not in variables


# --------------------------------------------------------------------------------------------------------- the commands


def test_the_port_that_was_asked_for_is_taken_or_refused():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {taken} is taken"):
            commands.choose_port(str(taken))
    assert commands.choose_port(str(taken)) == taken


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1", "8888.5", "²"])
def test_a_port_that_is_none_is_refused_with_the_range(port):
    with pytest.raises(SetupError, match="from 1 to 65535"):
        commands.choose_port(port)


def test_without_a_port_the_first_free_one_is_taken(monkeypatch):
    monkeypatch.setattr(commands, "is_free", lambda port: port >= 8890)
    assert commands.choose_port() == 8890
    monkeypatch.setattr(commands, "is_free", lambda port: False)
    with pytest.raises(SetupError, match="PORT=9000"):
        commands.choose_port()


@posix
@pytest.mark.parametrize(("browser", "opens"), [("", True), ("firefox", True), ("no", False), ("None", False)])
def test_jupyterlab_gets_its_token_where_nobody_can_read_it(monkeypatch, tmp_path, capsys, browser, opens):
    started = {}
    monkeypatch.setattr(os, "execve", lambda _, *call: started.update(command=call[0], variables=call[1]))
    monkeypatch.setattr(os, "chdir", lambda place: None)
    asked = commands.argparse.Namespace(venv=tmp_path, port="", browser=browser, token="secret")
    commands.lab(asked)
    assert started["variables"]["JUPYTER_TOKEN"] == "secret"
    assert not any("secret" in part for part in started["command"])
    assert f"--ServerApp.open_browser={opens}" in started["command"]
    assert "/lab/tree/notebooks/00_start_here.ipynb?token=secret" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- the Makefile


def make(*arguments: str, path: str) -> subprocess.CompletedProcess:
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make on this machine")
    return subprocess.run([program, *arguments], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True)


@posix
def test_make_without_any_python_says_what_to_do(tmp_path):
    done = make("lab", path=str(tmp_path))
    assert done.returncode != 0
    assert "labcore: error: no Python 3.10 or newer found — install one" in done.stderr


@posix
def test_make_with_an_old_python_says_so_by_name(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # what `python -c 'sys.exit(version < 3.10)'` does there
    old.chmod(0o755)
    done = make("test", f"PYTHON={old}", path="/usr/bin:/bin")
    assert done.returncode != 0
    assert f"no Python 3.10 or newer at '{old}'" in done.stderr
    assert "make test PYTHON=" in done.stderr


@posix
def test_make_passes_over_pythons_that_are_too_old(tmp_path):
    for name, answer in {"python3": 1, "python3.13": 127, "python3.12": 0}.items():
        script = f'#!/bin/sh\ncase "$1" in -c) exit {answer};; *) echo "{name} $@";; esac\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    done = make("lab", "PORT=8890", "BROWSER=no", path=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("python3.12 -m labcore.setup lab --port 8890 --browser no")


@posix
def test_a_token_of_the_shell_is_not_used_and_a_given_one_is(tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$1" in -c) ;; *) echo "$@";; esac\n')
    (tmp_path / "python3").chmod(0o755)
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make on this machine")
    variables = {"PATH": str(tmp_path), "TOKEN": "of-somebody"}
    plain = subprocess.run([program, "lab"], cwd=ROOT, env=variables, capture_output=True, text=True)
    given = subprocess.run([program, "lab", "TOKEN=mine"], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert "of-somebody" not in plain.stdout
    assert "--token mine" in given.stdout


def test_setting_up_needs_nothing_but_the_standard_library():
    code = "import labcore.setup.__main__, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {*sys.stdlib_module_names, "labcore", "__main__"}


def test_every_command_of_the_makefile_is_known_to_the_set_up():
    makefile = (ROOT / "Makefile").read_text()
    called = set(re.findall(r"\(call SETUP,([a-z-]+)", makefile))
    assert called == set(commands.COMMANDS)
