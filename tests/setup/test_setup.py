"""Setting up: each failure ends in one line that says what to do; half an environment is never taken for a whole one.

The environments here are stand-ins, a folder with a shell script for its Python; `make test` walks the real road.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import browser
import pytest

from labcore.files.folder_lock import folder_lock
from labcore.setup import __main__ as commands
from labcore.setup import clean as cleaning
from labcore.setup import environment as env
from labcore.setup.explain import SetupError, explain_import, explain_os, explain_pip, explain_venv
from labcore.setup.ownership import MARKER, MARKS, STAMP, UNFINISHED, empty, mark, why_not_ours

ROOT = Path(__file__).resolve().parents[2]
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
        (1, "WARNING: a\nERROR: something new\nWARNING: b\n", "failed (something new) — see pip.log"),
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
    line = explain_import(trace, "make clean VENV=/big/disk")
    assert "ImportError: libgomp.so.1" in line and "run `make clean VENV=/big/disk`" in line


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device — free 3 GB"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "a/b: Read-only file system — make that folder yours"),
        (OSError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: Not a directory"),
        (OSError("all gone"), "all gone"),
    ],
)
def test_what_the_system_refuses_is_explained_in_one_line(error, says):
    assert explain_os(error).startswith(says)


# ------------------------------------------------------------------------------------------------------ the environment


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder that holds only what an environment is made from."""
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(env, "ROOT", tmp_path)
    monkeypatch.setattr(cleaning, "ROOT", tmp_path)
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
        (path / UNFINISHED).touch()
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
        env.ensure_installed(project / ".venv")


def test_its_kernels_come_before_everybody_elses(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_PATH", "/opt/shared/jupyter")
    monkeypatch.setenv("PYTHONHOME", "/usr")
    variables = env.environment(tmp_path)
    assert variables["JUPYTER_PATH"].split(os.pathsep) == [str(tmp_path / "share/jupyter"), "/opt/shared/jupyter"]
    assert variables["PATH"].split(os.pathsep)[0] == str(env.venv_python(tmp_path).parent)
    assert "PYTHONHOME" not in variables


# ------------------------------------------------------------------------------------------------------ whose folder is it


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Every path under `folder`, links not followed, with what it holds."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            found[str(path.relative_to(folder))] = (
                os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            )
    return found


def fill(folder: Path, *names: str) -> Path:
    """Make `folder` with a small file of each name; subfolders come along."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"what is in {name}\n")
    return folder


ENVIRONMENT = ("pyvenv.cfg", "bin/python", "lib/python3.11/site-packages/torch.py", "share/jupyter/x", ".gitignore")


@pytest.fixture
def home(tmp_path_factory, monkeypatch) -> Path:
    """The home folder of a reader."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    return folder


@posix
@pytest.mark.parametrize("name", MARKS)
def test_ownership_also_of_an_environment_from_before_there_was_a_marker(project, name):
    venv = fill(project / ".venv", *ENVIRONMENT, name)
    env.refuse_foreign(venv)
    cleaning.clean(venv)
    assert not venv.exists()


@posix
def test_ownership_of_an_older_environment_outlives_an_update_that_fails(stand_in, capfd):
    env.ensure_installed(stand_in)
    (stand_in / MARKER).unlink()
    (stand_in / STAMP).write_text("other pins")
    (stand_in.parent / "behaviour").write_text("exit 1\n")
    with pytest.raises(SetupError):
        env.ensure_installed(stand_in)
    assert not (stand_in / STAMP).exists()
    env.refuse_foreign(stand_in)


def test_ownership_of_the_whole_disk_is_never_ours(project):
    assert why_not_ours(Path(project.anchor), project) == "holds the project's folder"


@posix
def test_ownership_begins_before_python_writes_its_first_file(project, monkeypatch):
    python = project / "python3"
    python.write_text('#!/bin/sh\nls -A "$3" >"$3/../seen"; touch "$3/half"; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SetupError):
        env.ensure_installed(project / "new/env")
    assert set((project / "new/seen").read_text().split()) == {MARKER, UNFINISHED}


@posix
def test_ownership_of_an_empty_folder_is_free(stand_in):
    stand_in.mkdir()
    env.ensure_installed(stand_in)
    assert (stand_in / MARKER).is_file()


def test_a_second_try_deletes_the_first_but_never_what_a_reader_put_there(project):
    venv = fill(project / ".venv", *ENVIRONMENT, MARKER, UNFINISHED, "labcore-pip.log", "notes.txt")
    before = tree(project)
    with pytest.raises(SetupError, match=r"\.venv also holds notes\.txt, which labcore did not make"):
        empty(venv)
    assert tree(project) == before
    (venv / "notes.txt").unlink()
    empty(venv)
    assert list(venv.iterdir()) == []


@posix
def test_a_second_make_waits_for_the_first_and_finds_its_work(stand_in, capfd):
    (stand_in.parent / "behaviour").write_text("sleep 0.1\n")
    errors = []

    def run() -> None:
        try:
            env.ensure_installed(stand_in)
        except BaseException as error:
            errors.append(error)

    both = [threading.Thread(target=run) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert errors == []
    assert calls(stand_in) == ["made", "requirements.lock", ".", "ipykernel"]
    assert "another process is setting up" in capfd.readouterr().out


HOLD = "import sys, time; from pathlib import Path; from labcore.files.folder_lock import folder_lock\n"
HOLD += "with folder_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@posix
def test_a_lock_ends_with_the_process_that_holds_it(tmp_path):
    waited = []
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with folder_lock(tmp_path, on_wait=lambda: (waited.append(time.monotonic()), holder.kill())):
            assert len(waited) == 1 and time.monotonic() - waited[0] < 30
    with folder_lock(tmp_path, on_wait=lambda: waited.append(0)):
        assert len(waited) == 1
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_lock_on_a_folder_that_was_deleted_meanwhile_is_refused(tmp_path):
    folder = tmp_path / "env"
    folder.mkdir()
    waiting, refused = threading.Event(), []

    def wait() -> None:
        try:
            with folder_lock(folder, on_wait=waiting.set):
                pass
        except FileNotFoundError as error:
            refused.append(str(error))

    with folder_lock(folder):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(30)
        folder.rmdir()
        folder.mkdir()
    thread.join()
    assert len(refused) == 1 and "run the same again" in refused[0]


@pytest.mark.parametrize("fcntl", [None, SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=lambda *_: os.stat("no/locks"))])
def test_a_lock_is_done_without_where_there_is_none(tmp_path, monkeypatch, fcntl):
    monkeypatch.setattr("labcore.files.folder_lock.fcntl", fcntl)
    with folder_lock(tmp_path), folder_lock(tmp_path):
        pass


def test_ownership_knows_every_part_of_a_fresh_environment(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    mark(tmp_path / "env")
    empty(tmp_path / "env")
    assert list((tmp_path / "env").iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------- clean


@posix
def test_clean_that_is_interrupted_can_be_repeated(project, monkeypatch, capsys):
    venv = fill(project / ".venv", *ENVIRONMENT, *MARKS)
    rmtree = shutil.rmtree

    def interrupted(path):
        rmtree(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cleaning.clean(venv)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert 0 < len(tree(venv)) < 14 and (venv / MARKER).exists()
    cleaning.clean(venv)
    assert not venv.exists()


def test_clean_follows_no_link_out_of_an_environment(project, tmp_path_factory):
    photos = fill(tmp_path_factory.mktemp("photos"), "cat.jpg", "more/dog.jpg")
    venv = fill(project / ".venv", *ENVIRONMENT, MARKER)
    (venv / "lib64").symlink_to(photos)
    (venv / "lib/photos").symlink_to(photos)
    cleaning.clean(venv)
    assert not venv.exists() and set(tree(photos)) == {"cat.jpg", "more", "more/dog.jpg"}


def test_clean_deletes_caches_by_what_they_hold_and_nothing_else(project, tmp_path_factory, capsys):
    fill(project / "notebooks/week 1", "02.ipynb", ".ipynb_checkpoints/02-checkpoint.ipynb")
    fill(project / "notebooks/Ana's", "a.py", "__pycache__/a.cpython-311.pyc", "__pycache__/a.cpython-311.pyc.139")
    fill(project / "labcore/course/__pycache__", "rules.cpython-311.pyc")
    for name in (".pytest_cache", ".ruff_cache", ".hypothesis", "labcore.egg-info"):
        fill(project / name, "x/y")
    elsewhere = fill(tmp_path_factory.mktemp("elsewhere"), "__pycache__/b.pyc", "v/x")
    gone = set(tree(project))
    fill(project, "requirements.lock", "notebooks/week 1/02.ipynb", "notebooks/Ana's/a.py", "pyproject.toml")
    # A copy whose notebook is gone may be the last one. The rest has the name of a cache, or holds one, and isn't ours.
    fill(project / "notebooks/week 1", ".ipynb_checkpoints/lost-checkpoint.ipynb")
    fill(project / "notebooks", "__pycache__/notes.txt", ".ipynb_checkpoints/plain.ipynb", "plain.ipynb")
    fill(project / "notebooks/env", "pyvenv.cfg", "lib/__pycache__/c.pyc")
    fill(project / "tests/clone", ".git/HEAD", "__pycache__/c.pyc")
    fill(project, "build/02.ipynb", "dist/02.ipynb", "__pycache__/top.pyc", "thesis.egg-info/x", "week/02.ipynb")
    (project / "data").symlink_to(elsewhere)
    (project / "notebooks/linked").symlink_to(elsewhere)
    kept = set(tree(project)) - gone | {"labcore", "labcore/course", "notebooks", "requirements.lock", "pyproject.toml"}
    kept |= {"notebooks/week 1", "notebooks/week 1/02.ipynb", "notebooks/week 1/.ipynb_checkpoints"}
    kept |= {"notebooks/Ana's", "notebooks/Ana's/a.py"}
    cleaning.clean(project / ".venv")
    assert set(tree(project)) == kept
    assert set(tree(elsewhere)) == {"__pycache__", "__pycache__/b.pyc", "v", "v/x"}
    said = capsys.readouterr().out
    assert "deleted .hypothesis\n" in said and "deleted 2 folders __pycache__ and .ipynb_checkpoints" in said


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


@pytest.fixture
def course(tmp_path, home) -> Path:
    """A copy of what `make` needs, in a folder with a name that a shell would cut up, and the Pythons to run it with."""
    folder = tmp_path / "Ana's course"
    for room in ("setup", "files"):
        shutil.copytree(ROOT / "labcore" / room, folder / "labcore" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "labcore/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    fill(folder, "notebooks/00.ipynb")
    return folder


def make(*arguments: str, path: str = "", folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make on this machine")
    path = path or os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    variables = {"PATH": path, "HOME": os.environ["HOME"], "PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run([program, *arguments], cwd=folder, env=variables, capture_output=True, text=True)


def whole(venv: Path, project: Path) -> Path:
    """A stand-in for an environment that is installed for `project`."""
    fill(venv, *ENVIRONMENT)
    mark(venv)
    return venv


@posix
@pytest.mark.parametrize("command", ["install", "lab", "test", "test-fast", "notebooks", "lint", "fetch"])
def test_make_leaves_a_folder_alone_that_labcore_did_not_make(course, tmp_path, command):
    fill(tmp_path / "my photos", "cat.jpg", "bin/notes.txt")
    before = tree(tmp_path)
    done = make(command, f"VENV={tmp_path}/my photos", folder=course)
    assert done.returncode != 0 and done.stdout == ""
    assert f"labcore: error: {tmp_path}/my photos was not made by labcore, so nothing in it was touched" in done.stderr
    assert tree(tmp_path) == before


@posix
@pytest.mark.parametrize("command", ["install", "clean"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".", "is the project's folder"),
        ("../..", "holds the project's folder"),
        ("notebooks", "was not made by labcore"),
        ("~", "is your home folder"),
        ("~/other-env", "was not made by labcore"),
        ("~/link", "is a link to "),
        ("~/link/", "is a link to "),
        ("~/dangling", "is a link to nowhere"),
        ("~/a file", "is a file"),
        ("-rf", "-rf was not made by labcore"),
        ("a\nb", "a\\nb was not made by labcore"),
        ("$$(touch evil)", "$(touch evil) was not made by labcore"),
        ("é `touch evil` \"'\\", "was not made by labcore"),
    ],
)
def test_make_touches_nothing_that_is_not_an_environment_of_ours(course, home, command, name, says):
    for path in ("other-env/lib/x", "photos/cat.jpg"):
        fill(home, path)
    for path in ("-rf/x", "a\nb/x", "$(touch evil)/x", "é `touch evil` \"'\\/x"):
        fill(course, path)
    fill(home / "photos", MARKER)  # and yet a link to it is refused
    (home / "link").symlink_to(home / "photos")
    (home / "dangling").symlink_to("nowhere")
    fill(home, "a file")
    mark(course)  # no marker makes these ours
    mark(home)
    before = tree(course.parent), tree(home)
    done = make(command, f"VENV={name}", folder=course)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("labcore: error:")]
    assert says in line
    assert (tree(course.parent), tree(home)) == before


@posix
@pytest.mark.parametrize(
    "name", ["env", "my env", "Ana's", 'a "b"', "~/lab env", "-x", "a\nb", "été", "a;touch evil", "`touch evil`", "a*"]
)
def test_make_clean_deletes_the_environment_that_was_named_and_no_other(course, home, name):
    fill(course, "my/photos.jpg", "a/x", "ab/x", "env2/x")
    before = tree(course), tree(home)
    whole(home / name[2:] if name.startswith("~/") else course / name, course)
    assert (tree(course), tree(home)) != before
    done = make("clean", f"VENV={name}", folder=course)
    assert (done.returncode, done.stderr) == (0, "")
    assert "labcore: deleted " in done.stdout
    assert (tree(course), tree(home)) == before


@posix
def test_make_clean_does_not_mean_a_venv_of_the_shell(course, home):
    other, own = whole(home / "other env", course), whole(course / ".venv", course)
    for flags in ([], ["-e"]):
        done = make("clean", *flags, folder=course, VENV=str(other))
        assert done.returncode == 0 and other.exists() and not own.exists()
        assert f"left alone; to delete it: make clean VENV='{other}'" in done.stdout
    assert make("clean", f"VENV={other}", folder=course).returncode == 0
    assert not other.exists()


@posix
def test_make_clean_in_a_folder_that_is_not_the_courses_deletes_nothing(course, tmp_path):
    fill(tmp_path, ".pytest_cache/x", "build/x", "notebooks/__pycache__/x.pyc", "thesis.egg-info/x")
    whole(tmp_path / ".venv", course)
    before = tree(tmp_path)
    for installed in ({}, {"PYTHONPATH": str(course)}):  # a labcore that is found from everywhere cleans nothing from elsewhere
        assert make("-f", str(course / "Makefile"), "clean", folder=tmp_path, **installed).returncode != 0
    assert tree(tmp_path) == before


@posix
def test_make_takes_a_tilde_for_the_home_folder(course, home, tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$1" in -c) ;; *) printf "%s\\n" "$@";; esac\n')
    (tmp_path / "python3").chmod(0o755)
    assert "--venv=~/labenv" in make("install", "VENV=~/labenv", path=str(tmp_path)).stdout.splitlines()
    assert commands.venv_path("~/labenv") == home / "labenv"
    assert commands.venv_path("") == ROOT / ".venv"
    assert commands.venv_path("a/~/b") == ROOT / "a/~/b"
    with pytest.raises(SetupError, match="VENV is '~nobody-of-this-name/env'"):
        commands.venv_path("~nobody-of-this-name/env")


@posix
@pytest.mark.parametrize("name", ["my py/python3", "~/my py/python3", "a'b \"c\"/python3"])
def test_make_tries_the_python_that_was_named(home, tmp_path, name):
    python = home / name[2:] if name.startswith("~/") else tmp_path / name
    fill(python.parent, python.name)
    python.write_text('#!/bin/sh\ncase "$1" in -c) ;; *) echo "ran $0 $@";; esac\n')
    python.chmod(0o755)
    done = make("install", f"PYTHON={name if name.startswith('~') else python}")
    assert done.stdout.startswith(f"ran {python} -m labcore.setup install"), done.stderr


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
    assert done.stdout.startswith("python3.12 -m labcore.setup lab --venv= --port=8890 --browser=no --token= --python=")


@posix
def test_a_token_of_the_shell_is_not_used_and_a_given_one_is(tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$1" in -c) ;; *) echo "$@";; esac\n')
    (tmp_path / "python3").chmod(0o755)
    plain = make("lab", path=str(tmp_path), TOKEN="of-somebody")
    given = make("lab", "TOKEN=mine", path=str(tmp_path), TOKEN="of-somebody")
    assert "of-somebody" not in plain.stdout
    assert "--token=mine" in given.stdout


@posix
def test_make_hands_the_wish_for_a_browser_on_to_the_tests(tmp_path):
    (tmp_path / "python3").write_text('#!/bin/sh\ncase "$1" in -c) ;; *) echo "browser tests: $BROWSER_TESTS";; esac\n')
    (tmp_path / "python3").chmod(0o755)
    assert make("test", "BROWSER_TESTS=install", path=str(tmp_path)).stdout == "browser tests: install\n"
    assert make("test", path=str(tmp_path)).stdout == "browser tests: \n"


class TestChromium:
    """What the browser tests do on a machine without a Chromium."""

    @pytest.fixture
    def apt(self, monkeypatch) -> list[list[str]]:
        """Every call of apt-get, which would succeed and install nothing; there is no Chromium on the PATH."""
        called: list[list[str]] = []
        monkeypatch.setattr(shutil, "which", lambda name: None)
        done = subprocess.CompletedProcess([], 0, "", "")
        monkeypatch.setattr(subprocess, "run", lambda command, **options: (called.append(command), done)[1])
        return called

    def test_nothing_is_installed_unless_asked_and_the_skip_says_how(self, apt, monkeypatch):
        monkeypatch.delenv("BROWSER_TESTS", raising=False)
        with pytest.raises(pytest.skip.Exception, match="no Chromium on this machine; to get one: .*BROWSER_TESTS=install"):
            browser.find_chromium()
        assert apt == []

    def test_when_asked_it_is_installed_or_the_test_fails(self, apt, monkeypatch):
        monkeypatch.setenv("BROWSER_TESTS", "install")
        with pytest.raises(pytest.fail.Exception, match="no program named chromium"):
            browser.find_chromium()
        assert [command[1] for command in apt] == ["update", "install"]
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/chromium" if name == "chromium" and apt else None)
        assert browser.find_chromium() == "/usr/bin/chromium"

    def test_when_apt_fails_so_does_the_test_with_its_reason(self, apt, monkeypatch):
        monkeypatch.setenv("BROWSER_TESTS", "install")
        failed = subprocess.CompletedProcess([], 100, "", "E: one\nE: are you root?\n")
        monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
        with pytest.raises(pytest.fail.Exception, match="apt-get update failed: .*are you root"):
            browser.find_chromium()

    def test_when_there_is_no_apt_the_test_says_what_to_do(self, apt, monkeypatch):
        monkeypatch.setenv("BROWSER_TESTS", "install")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(subprocess, "run", lambda *command, **options: os.stat("no/apt-get"))
        with pytest.raises(pytest.fail.Exception, match="takes apt-get .*install chromium"):
            browser.find_chromium()


def test_make_test_lists_what_was_skipped_and_why(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: (ran.extend(command), SimpleNamespace(returncode=0))[1])
    commands.test(commands.argparse.Namespace(venv=tmp_path))
    assert "-rs" in ran


def test_setting_up_needs_nothing_but_the_standard_library():
    code = "import labcore.setup.__main__, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {*sys.stdlib_module_names, "labcore", "__main__"}


def test_every_command_of_the_makefile_is_known_to_the_set_up():
    makefile = (ROOT / "Makefile").read_text()
    called = set(re.findall(r"\(call SETUP,([a-z-]+)", makefile))
    assert called == set(commands.COMMANDS)
