"""`labcore check`: the learner's progress on the command line, and a whole notebook checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import mini_course
import psutil
import pytest
from mini_course import cell, mini_notebook, write
from nbformat.v4 import new_notebook

from labcore.cli import main as cli
from labcore.course import exercises as specs
from labcore.course.author.notebooks import clean, code_cells, execute, read_notebook, run_notebook
from labcore.course.author.student_folder import build
from labcore.course.learner.progress import NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def only_the_mini_exercises(monkeypatch, tmp_path):
    monkeypatch.setattr(specs, "__path__", [str(mini_course.HERE)])
    monkeypatch.chdir(tmp_path)


def record(folder, **states):
    states = {f"77.{name}": state for name, state in states.items()}
    (folder / NAME).write_text(json.dumps({"format": 1, "exercises": states}))


def test_it_shows_what_is_done_minutes_left_and_what_comes_next(tmp_path, capsys):
    record(tmp_path, allocate="done", leak="not yet")
    assert cli.main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "77                         1 of 3 exercises done, about 12 minutes left",
        "next: 77.total, a sum (2 min)",
    ]
    assert cli.main(["check", "77"]) == 0
    assert "  not yet  77.leak                   10 min  ●●○  the leak" in capsys.readouterr().out


def test_a_folder_that_is_not_there_has_no_progress_to_show(tmp_path, capsys):
    assert cli.main(["check", "--folder", str(tmp_path / "nowhere")]) == 2
    assert "--folder is" in capsys.readouterr().err


def test_it_finds_the_progress_of_the_notebooks_folder(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    record(tmp_path / "notebooks", total="done")
    assert cli.main(["check"]) == 0
    assert "1 of 3 exercises done" in capsys.readouterr().out
    assert cli.main(["check", "--folder", str(tmp_path)]) == 0
    assert "0 of 3 exercises done" in capsys.readouterr().out


def test_it_speaks_json(tmp_path, capsys):
    record(tmp_path, allocate="done")
    assert cli.main(["check", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["minutes_left"] == 12 and said["next"] == "77.total, a sum (2 min)"
    assert [e["state"] for e in said["exercises"]] == ["done", "open", "open"]


def test_a_broken_progress_file_is_said_to_be_one(tmp_path, capsys):
    (tmp_path / NAME).write_text("{")
    assert cli.main(["check"]) == 0
    assert "can't be read: the next check sets it aside, and progress starts afresh" in capsys.readouterr().out
    assert (tmp_path / NAME).read_text() == "{", "a look changes nothing"


def test_a_file_that_is_no_notebook_of_the_course_is_refused(tmp_path, capsys):
    write(tmp_path, clean(new_notebook(cells=[cell("code", "1")])), "essay.ipynb")
    assert cli.main(["check", "essay.ipynb"]) == 2
    assert "essay.ipynb is not one of the course's notebooks" in capsys.readouterr().err
    assert cli.main(["check", "77_none.ipynb"]) == 2
    assert "77_none.ipynb: can't be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_notebook_is_run_and_judged_and_left_as_it_was(tmp_path, capsys):
    master = write(tmp_path / "masters", mini_notebook())
    (student,) = build(tmp_path / "masters", tmp_path / "student")
    before = student.read_bytes()
    assert cli.main(["check", str(student)]) == 1
    assert "0 of 3 exercises done, about 20 minutes left" in capsys.readouterr().out
    assert student.read_bytes() == before
    assert not (tmp_path / "student" / NAME).exists()
    assert cli.main(["check", str(master)]) == 0
    assert "3 of 3 exercises done, complete" in capsys.readouterr().out


def broken_off(folder, source: str) -> Path:
    """The mini notebook with a cell in its middle that ends the run, after one of its three exercises was checked."""
    notebook = mini_notebook()
    notebook.cells.insert(6, cell("code", source))
    return write(folder, clean(notebook))


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("\nwhile True: # a loop\n    pass", ["--cell-timeout", "2"], "it was still running after 2 s"),
        ("while True: # a loop\n    print('x' * 1_000)", [], "it wrote more than 10 MB of output"),
        ("while True: # a loop\n    __import__('os')._exit(3)", [], "its kernel died, by exit(), for lack of memory, or"),
        ("while True: # a loop\n    break\nexit()", [], "its kernel died, by exit()"),
    ],
    ids=["endless", "flood", "death", "exit"],
)
def test_check_of_a_notebook_that_breaks_off_names_the_cell_and_keeps_the_verdicts(tmp_path, capfd, source, options, reason):
    path = broken_off(tmp_path / "it's my course", source)
    assert cli.main(["check", str(path), *options]) == 1
    said, errors = capfd.readouterr()
    assert "  done     77.allocate " in said and "  not run  77.total " in said and "  not run  77.leak " in said
    assert said.splitlines()[-1].startswith(f"stopped at cell 7 (`while True: # a loop`): {reason}")
    assert "Traceback" not in errors and "Task exception" not in errors
    assert cli.main(["check", str(path), *options, "--json"]) == 1
    data = json.loads(capfd.readouterr().out)
    assert [e["state"] for e in data["exercises"]] == ["done", "not run", "not run"]
    assert data["stopped"]["cell"] == 7 and data["stopped"]["reason"].startswith(reason)
    assert data["minutes_left"] == 12 and data["next"].startswith("77.total")


def test_check_is_interrupted_in_good_order(tmp_path):
    """Ctrl-C at a cell that never ends: the cell, the verdicts so far, status 130, and no kernel left behind."""
    path = broken_off(tmp_path, "import os\nprint(open('pid', 'w').write(str(os.getpid())))\nwhile True:\n    pass")
    code = "import sys, labcore.course.exercises as s; s.__path__ = [sys.argv.pop(1)]\n"
    code += "from labcore.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(mini_course.HERE), "check", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "  done     77.allocate " in said and "  not run  77.total " in said
    assert said.splitlines()[-1] == "stopped at cell 7 (`import os`): interrupted."
    assert "Traceback" not in errors and "Task exception" not in errors
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "1e9"])
def test_check_refuses_a_cell_timeout_out_of_range(tmp_path, capsys, limit):
    write(tmp_path, mini_notebook())
    assert cli.main(["check", "77_mini.ipynb", f"--cell-timeout={limit}"]) == 2
    assert "--cell-timeout is " in capsys.readouterr().err
    assert cli.main(["check", "77", "--cell-timeout=5"]) == 2
    assert "is for a notebook file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["78", "seventy-seven", "77_mini", "notebooks/77"])
def test_check_refuses_a_notebook_that_there_is_not(capsys, name):
    assert cli.main(["check", name]) == 2
    assert f"notebook is {name!r}; it must be a file, or one of 77." in capsys.readouterr().err


def test_paths_on_the_command_line_may_begin_with_the_home_folder(tmp_path, capsys, monkeypatch):
    """A shell leaves the ~ of --out=~/student as it is; it used to become a folder of that name."""
    home = tmp_path / "my home"
    monkeypatch.setenv("HOME", str(home))
    home.mkdir()
    write(home / "masters", mini_notebook())
    record(home, allocate="done")
    assert cli.main(["student", "build", "--notebooks=~/masters", "--out=~/student"]) == 0
    assert (home / "student" / "77_mini.ipynb").exists() and not (tmp_path / "~").exists()
    capsys.readouterr()
    assert cli.main(["check", "--folder=~"]) == 0
    assert "1 of 3 exercises done" in capsys.readouterr().out
    cli.main(["course", "rules", "--notebooks=~/masters"])
    assert "77_mini.ipynb" in capsys.readouterr().out


def test_check_without_a_kernel_says_so_in_one_line(tmp_path, capsys, monkeypatch):
    write(tmp_path, mini_notebook())
    monkeypatch.setattr("labcore.course.author.notebooks.KERNELSPEC", {"name": "no-such-kernel"})
    assert cli.main(["check", "77_mini.ipynb"]) == 1
    said = capsys.readouterr().err
    assert "no Jupyter kernel could be started (No such kernel named no-such-kernel)" in said and said.count("\n") == 1


def test_check_finds_a_notebook_in_the_home_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["check", "~/77_none.ipynb"]) == 2
    assert "77_none.ipynb: can't be read (No such file" in capsys.readouterr().err
    write(tmp_path, mini_notebook()).write_text("not json")
    assert cli.main(["check", "~/77_mini.ipynb"]) == 2
    assert "77_mini.ipynb: is not a notebook" in capsys.readouterr().err


ENDLESS = """from labcore.course.learner.verdict import CheckSession
import labcore.course.exercises
labcore.course.exercises.__path__.append({folder!r})
from labcore.kvcache.blocks import BlockPool
class Endless(BlockPool):
    def allocate(self, n):
        while True:
            try:
                pass
            except Exception:
                pass
session = CheckSession(timeout=0.5)"""


@pytest.mark.slow
def test_an_endless_loop_does_not_hang_a_kernel(tmp_path):
    cells = [ENDLESS.format(folder=str(mini_course.HERE)), 'session.check("77.allocate", Endless)', "6 * 7"]
    notebook = clean(new_notebook(cells=[cell("code", source) for source in cells]))
    execute(notebook, tmp_path)
    first, second = (code.outputs for _, code in list(code_cells(notebook))[1:])
    assert "77.allocate   not yet — it was still running after 0.5 s, in allocate" in first[0].text
    assert second[0].data["text/plain"] == "42"


@pytest.mark.slow
def test_printed_text_compares_equal_however_it_was_cut_into_messages(tmp_path):
    """Case: importing tqdm changed how printed text was split into messages, and stored outputs no longer matched."""
    cells = [
        "import time\nfrom tqdm.auto import tqdm",
        "import sys\nfor word in ('one', 'two', 'three'):\n    print(word)\n    sys.stdout.flush()",
        "for _ in tqdm(range(3), disable=True):\n    print('step', flush=True)",
    ]
    path = write(tmp_path, clean(new_notebook(cells=[cell("code", source) for source in cells])))
    run_notebook(path)
    assert read_notebook(path).cells[1].outputs[0].text == "one\ntwo\nthree\n"
    slow = path.read_text().replace("sys.stdout.flush()", 'sys.stdout.flush()\\n",\n    "    time.sleep(0.2)')
    (tmp_path / "77_slow.ipynb").write_text(slow)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "77_mini.ipynb", "77_slow.ipynb"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_the_course_needs_no_torch_until_an_engine_runs():
    """A machine where torch doesn't load still checks exercises, builds editions and shows progress."""
    code = "import sys, labcore.course, labcore.cli.course_tools, labcore.cli.student, labcore.cli.check;"
    code += "print('torch' in sys.modules, 'nbclient' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
