"""`labcore bench chunking`: the figures are what their names say. How good they are is for a quiet machine to judge."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny

from labcore.bench import chunking
from labcore.bench.chunking import AUTO, WHOLE, Result, Times, Work, engine_for, gaps, make_work, median_of, percentile
from labcore.cli import main
from labcore.models import from_model


@pytest.fixture(scope="module")
def loaded():
    return from_model(tiny("llama"))


def test_the_streams_outlast_the_prompt_under_the_smallest_budget(loaded):
    work = make_work(loaded.vocab_size, num_streams=3, prompt_tokens=60, budgets=[9, 64])
    assert len(work.streams) == 3 and len(work.long) == 60
    assert work.output_tokens >= chunking.CALM_STEPS + 60 // (9 - 3)


def test_a_setting_decides_how_a_prompt_is_computed(loaded):
    work = Work([[1, 2, 3]], list(range(1, 50)), 4)
    steps = {}
    for setting in (WHOLE, "16", AUTO):
        engine = engine_for(setting, loaded, work)
        engine.add_request("talks", work.streams[0], chunking.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        engine.step()
        engine.add_request("long", work.long, chunking.SamplingParams(temperature=0, max_tokens=1))
        steps[setting] = 0
        while "long" in engine.request_ids():
            engine.step()
            steps[setting] += 1
        engine.check_integrity()
    assert steps == {WHOLE: 1, "16": 4, AUTO: 2}


def test_gaps_are_those_that_end_within_the_moments_given():
    streams = [[1.0, 2.0, 5.0, 6.0], [1.5, 3.0]]
    assert sorted(gaps(streams)) == [1.0, 1.0, 1.5, 3.0]
    assert sorted(gaps(streams, after=2.0, until=5.0)) == [1.5, 3.0]
    assert percentile([3, 1, 2], 0.99) == 3 and percentile([3, 1, 2], 0.5) == 2


def test_throughput_is_relative_to_whole_prompts_and_the_goal_wants_both():
    fast = Times(calm=10, overall=12, p99=19, longest=25, ttft=90, seconds=2.0, budget=64)
    slow = Times(calm=10, overall=12, p99=21, longest=25, ttft=90, seconds=2.0, budget=64)
    assert median_of([fast, slow, slow]).p99 == 21
    assert Result("64", fast, 0.95).meets_the_goal
    assert not Result("64", slow, 0.95).meets_the_goal and not Result("64", fast, 0.85).meets_the_goal


def test_the_command_prints_every_setting_with_its_circumstances(loaded, monkeypatch, capsys):
    monkeypatch.setattr(chunking, "load", lambda *_: loaded)
    command = ["bench", "chunking", "--streams", "3", "--prompt-tokens", "60", "--budgets", "9", "20", "--rounds", "1"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["setting"] for result in report["results"]] == ["whole", "9", "20", "auto"]
    assert report["machine"] and report["versions"]["torch"] and report["goal"]["throughput_loss"] == 0.1
    whole, smallest = report["results"][:2]
    assert whole["throughput_of_whole"] == 1.0 and smallest["budget"] == 9
    assert all(0 < r["calm"] and 0 < r["p99"] <= r["longest"] <= r["ttft"] + 0.2 for r in report["results"])
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 1


def test_a_budget_that_leaves_prompts_nothing_is_refused(capsys):
    assert main(["bench", "chunking", "--streams", "10", "--budgets", "10"]) == 2
    assert "each budget above the streams" in capsys.readouterr().err
