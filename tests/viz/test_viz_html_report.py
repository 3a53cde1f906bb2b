"""`labcore trace` and its page: self-contained, linked, and one line for what can't be done."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from toy_engine import ToyEngine

from labcore.cli.main import main
from labcore.recorder import Recording
from labcore.viz.html_report import event_line, html_report

EVIL = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def recorder():
    engine = ToyEngine(10, 4, budget=12, max_seqs=4, prefix_cache=True)
    for name, prompt, outputs in (("ana", 9, 8), (EVIL, 9, 10), ("cy", 14, 3)):
        engine.add(name, prompt, outputs)
    return engine.run().recorder


@pytest.fixture
def file(recorder, tmp_path):
    recorder.save(tmp_path / "run.jsonl")
    return str(tmp_path / "run.jsonl")


def test_html_report_holds_every_figure_with_a_frame_for_every_step(recorder):
    html = html_report(recorder, title=EVIL)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))
    assert data["steps"] == recorder.steps
    for picture in data["pictures"]:
        assert [frame["name"] for frame in picture["figure"]["frames"]] == [str(step) for step in recorder.steps]
        assert "sliders" not in picture["figure"]["layout"]
    assert len(data["pictures"]) == 5
    assert data["words"]["3"].startswith("step 3   10 blocks")
    assert [line.split()[0] for line in data["events"]["1"]] == [event.kind for event in recorder.events(1)]


def test_html_report_loads_nothing_and_runs_no_name(recorder):
    html = html_report(recorder, title=EVIL)
    own = re.sub(r"<script>/\*\*.*?</script>", "", html, flags=re.S)  # without plotly.js
    assert "Content-Security-Policy" in html and "default-src 'none'" in html
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    assert EVIL not in html and "&lt;/script&gt;" in html


def test_html_report_events_are_lines_of_text(recorder):
    lines = [event_line(recorder, event) for event in recorder.events()]
    assert "arrive         ana  prompt 9  priority 0  max_tokens 8" in lines
    assert "allocate       ana  [0, 1, 2]" in lines
    assert any(line.startswith("finish         ana  reason 'length'") for line in lines)


def test_trace_tells_about_a_record(file, recorder, capsys):
    assert main(["trace", file]) == 0
    told = capsys.readouterr().out
    assert f"{len(recorder.steps)} steps, 3 requests, 10 blocks of 4" in told and "ana  " in told
    assert main(["trace", file, "--step", "2"]) == 0
    assert "step 2   10 blocks" in capsys.readouterr().out
    assert main(["trace", file, "--step", "2", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert state["step"] == 2
    assert [block["state"] for block in state["blocks"]] == [block.state for block in recorder.at(2).blocks]


def test_trace_writes_the_html_report(file, tmp_path, capsys):
    out = tmp_path / "run.html"
    assert main(["trace", file, "--html", str(out)]) == 0
    assert "run.html" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "999"], "step is 999; recorded steps are 1 …"),
        (["--step", "999", "--json"], "step is 999"),
        (["--step", "999", "--html", "never.html"], "step is 999"),
        (["--html", ""], "Is a directory"),
        (["--html", "/no/such/folder/out.html"], "/no/such/folder/out.html"),
    ],
)
def test_what_trace_cannot_do_it_says_in_one_line(file, capsys, arguments, message):
    assert main(["trace", file, *arguments]) > 0
    out, error = capsys.readouterr()
    assert message in error and error.count("\n") == 1 and out == ""


def test_trace_knows_the_home_folder(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(file).rename(tmp_path / "my run.jsonl")
    assert main(["trace", "~/my run.jsonl", "--html=~/page.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["html"] == str(tmp_path / "page.html")


def test_trace_never_writes_over_the_record_or_half_a_html_report(file, tmp_path, capsys):
    record = Path(file).read_bytes()
    assert main(["trace", file, "--html", file]) == 2
    assert "the record itself" in capsys.readouterr().err and Path(file).read_bytes() == record
    for link in (os.link, os.symlink):
        link(file, tmp_path / link.__name__)
        assert main(["trace", file, "--html", str(tmp_path / link.__name__)]) == 2
        assert "the record itself" in capsys.readouterr().err and Path(file).read_bytes() == record
    out = tmp_path / "run.html"
    assert main(["trace", file, "--html", str(out), "--title", "a\udcff"]) == 0, "a byte that is no text, from a shell"
    assert "<title>a?</title>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ('"chunks":[0,', '"chunks":[77,'),
        ('["arrive",0', '["arrive",9'),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--json"], ["--html", "never.html"]])
def test_trace_refuses_a_record_that_contradicts_itself(file, capsys, there, instead, arguments):
    text = Path(file).read_text()
    assert there in text
    Path(file).write_text(text.replace(there, instead))
    assert main(["trace", file, *arguments]) == 2
    error = capsys.readouterr().err
    assert "contradicts itself" in error and error.count("\n") == 1 and not Path("never.html").exists()


@pytest.mark.parametrize("arguments", [["--json"], ["--html", "never.html"], ["--step", "2"]])
def test_trace_refuses_a_record_with_missing_blocks(file, capsys, arguments):
    Path(file).write_text(Path(file).read_text().replace('"num_blocks":10', '"num_blocks":2'))
    assert main(["trace", file, *arguments]) == 2
    assert "contradicts itself" in capsys.readouterr().err


@pytest.mark.parametrize("instead", ['"num_blocks":"x"', '"num_blocks":0', '"num_blocks":null'])
def test_trace_refuses_a_header_without_a_size(file, capsys, instead):
    Path(file).write_text(Path(file).read_text().replace('"num_blocks":10', instead))
    assert main(["trace", file]) == 2
    assert "num_blocks is" in capsys.readouterr().err


def test_trace_keeps_events_after_the_last_step_pending(tmp_path, capsys):
    engine = ToyEngine()
    engine.add("early", 5, 3)
    engine.run()
    steps = engine.recorder.steps
    engine.add("late", 5, 3)
    engine.recorder.save(tmp_path / "run.json")
    loaded = Recording.load(tmp_path / "run.json")
    assert loaded.steps == steps and loaded.request_ids() == engine.recorder.request_ids()
    assert [event.kind for event in loaded.events()][-1] == "arrive"
    assert main(["trace", str(tmp_path / "run.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == len(steps)


def test_trace_refuses_files_that_are_no_record(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert main(["trace", str(path)]) == 2
    assert "is not a labcore flight record" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "missing.jsonl")]) > 0
    assert "missing.jsonl" in capsys.readouterr().err
    ToyEngine().recorder.save(tmp_path / "run.jsonl")
    assert main(["trace", str(tmp_path / "run.jsonl")]) == 2
    assert "holds no step" in capsys.readouterr().err
