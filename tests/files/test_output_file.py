"""What labcore writes for a reader is whole or not there, and never in the place of a file that it did not write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from toy_engine import ToyEngine

from labcore.attention.offline_compile import compile_gate
from labcore.bench.gpu import run as gpu
from labcore.cli.main import main
from labcore.files.output_file import output_file, whole_file
from labcore.recorder import Recording
from labcore.viz.html_report import write_html_report

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has other modes and devices")


def write(path: Path, text: str = "ours: new") -> None:
    with output_file(path, lambda start: start.startswith("ours"), "one of ours") as file:
        file.write(text)


@pytest.fixture
def recorder():
    engine = ToyEngine(10, 4, budget=10, max_seqs=4, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    engine.add("ana", 9, 3)
    return engine.run().recorder


@pytest.mark.parametrize("before", [None, "", "ours: old"])
def test_output_goes_to_a_new_file_an_empty_one_and_one_of_ours(tmp_path, before):
    if before is not None:
        (tmp_path / "x").write_text(before)
    write(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "ours: new"
    assert os.listdir(tmp_path) == ["x"]


def test_output_never_goes_over_a_file_of_another_kind(tmp_path):
    (tmp_path / "notes").write_bytes(b"\xff my notes")
    (tmp_path / "link").symlink_to("notes")
    for name in ("notes", "link"):
        with pytest.raises(ValueError, match="notes is there and is not one of ours; it was not touched"):
            write(tmp_path / name)
    assert (tmp_path / "notes").read_bytes() == b"\xff my notes"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_output_that_breaks_off_leaves_the_older_file_whole(tmp_path, error):
    (tmp_path / "x").write_text("ours: old")
    with pytest.raises(type(error)), output_file(tmp_path / "x", lambda start: True, "") as file:
        file.write("ours: ne")
        raise error
    assert (tmp_path / "x").read_text() == "ours: old"
    assert os.listdir(tmp_path) == ["x"]


@posix
def test_output_keeps_links_and_modes_and_devices(tmp_path):
    (tmp_path / "x").write_text("ours: old")
    (tmp_path / "x").chmod(0o640)
    (tmp_path / "link").symlink_to("x")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "x").read_text() == "ours: new"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    write(Path(os.devnull))
    assert Path(os.devnull).is_char_device()
    umask = os.umask(0o077)
    try:
        write(tmp_path / "private")
    finally:
        os.umask(umask)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_output_into_a_folder_that_is_not_there_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error, whole_file(tmp_path / "no/x"):
        pass
    assert error.value.filename == str(tmp_path / "no/x")


def test_flight_record_replaces_an_older_one_and_nothing_else(tmp_path, recorder):
    notebook = tmp_path / "02.ipynb"
    notebook.write_text('{"cells": []}')
    with pytest.raises(ValueError, match="02.ipynb is there and is not a labcore flight record"):
        recorder.save(notebook)
    assert notebook.read_text() == '{"cells": []}'
    recorder.save(tmp_path / "run.jsonl")
    recorder.save(tmp_path / "run.jsonl")
    assert Recording.load(tmp_path / "run.jsonl").steps == recorder.steps


def test_flight_record_that_cannot_be_written_leaves_the_older_one(tmp_path, recorder, monkeypatch):
    recorder.save(tmp_path / "run.jsonl")
    before = (tmp_path / "run.jsonl").read_bytes()
    monkeypatch.setattr("labcore.recorder.jsonl._to_json", lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorder.save(tmp_path / "run.jsonl")
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_html_report_replaces_an_older_one_and_nothing_else(tmp_path, recorder, capsys):
    record, page, thesis = tmp_path / "run.jsonl", tmp_path / "run.html", tmp_path / "thesis.html"
    recorder.save(record)
    thesis.write_text("<!doctype html>\n<title>My thesis</title>")
    before = thesis.read_text()
    assert main(["trace", str(record), "--html", str(thesis)]) == 2
    assert "thesis.html is there and is not a page that labcore made" in capsys.readouterr().err
    assert thesis.read_text() == before
    write_html_report(recorder, page, title="first")
    write_html_report(recorder, page, title="second")
    assert "<title>second</title>" in page.read_text(encoding="utf-8")


def test_measurements_are_not_begun_if_their_file_is_of_another_kind(tmp_path, monkeypatch, capsys):
    thesis = tmp_path / "thesis.json"
    thesis.write_text('{"benchmark": 3}')
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    monkeypatch.setattr(gpu, "measure", None)
    assert main(["bench", "gpu", "--out", str(thesis)]) == 2
    monkeypatch.setattr(compile_gate, "build_all", None)
    with pytest.raises(ValueError, match="is not a table of these figures"):
        compile_gate.main(["--json", str(thesis)])
    assert thesis.read_text() == '{"benchmark": 3}'
