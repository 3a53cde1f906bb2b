"""`labcore bench prefix`: the figures are what their names say. How good they are is for a quiet machine to judge."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tiny_models import tiny

from labcore.bench import prefix_reuse as prefix
from labcore.cli.main import main
from labcore.models import from_model


def test_the_look_up_prints_its_time_beside_its_goal(capsys):
    assert main(["bench", "prefix", "--only", "look-up", "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    times = report["results"]["look_up_ms"]
    assert 0 < times["again"] < times["first"] and report["goal"]["look_up_ms_below"] == 15


def test_more_samples_save_more_and_beams_save_more_than_samples():
    loaded, prompts = from_model(tiny("llama")), [list(range(1, 40)), list(range(50, 70))]
    samples, beams = (
        [prefix.saved_by_sharing(loaded, prompts, (12, 12), params(width)) for width in (2, 4)]
        for params in prefix.KINDS.values()
    )
    assert 0 < samples[0] < samples[1] and samples[0] < beams[0] and samples[1] < beams[1]


def test_overhead_is_measured_where_nothing_is_found(monkeypatch):
    monkeypatch.setattr(prefix, "lognormal_workload", lambda n, vocab: SimpleNamespace(
        prompts=[[i + 1] * 20 for i in range(n)], output_lens=[4] * n))  # fmt: skip
    found = prefix.overhead(from_model(tiny("llama")), num_requests=4)
    assert found["hit_tokens"] == 0 and 0 < found["share"] < 1
