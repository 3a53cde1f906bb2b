"""`labcore bench chunking`: the figures are what their names say. How good they are is for a quiet machine to judge."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny

from labcore.bench import prefill_stalls as chunking
from labcore.bench.prefill_stalls import (
    AUTO,
    WHOLE,
    StallResult,
    StallTimes,
    StallWorkload,
    engine_for,
    gaps,
    make_workload,
    median_of,
    result_of,
)
from labcore.cli.main import main
from labcore.models import from_model
from labcore.workload.metrics import percentile


@pytest.fixture(scope="module")
def loaded():
    return from_model(tiny("llama"))


def test_the_streams_outlast_the_prompt_under_the_smallest_budget(loaded):
    work = make_workload(loaded.vocab_size, num_streams=3, stream_tokens=7, prompt_tokens=60, budgets=[9, 64])
    assert [len(prompt) for prompt in work.streams] == [7] * 3 and len(work.long) == 60
    assert work.output_tokens >= 2 * chunking.BASELINE_STEPS + 60 // (9 - 3)


def test_a_setting_decides_how_a_prompt_is_computed(loaded):
    work = StallWorkload([[1, 2, 3]], list(range(1, 50)), 4)
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
    assert steps == {WHOLE: 1, "16": 4, AUTO: 3}


def test_gaps_are_those_that_end_within_the_moments_given():
    streams = [[1.0, 2.0, 5.0, 6.0], [1.5, 3.0]]
    assert sorted(gaps(streams)) == [1.0, 1.0, 1.5, 3.0]
    assert sorted(gaps(streams, after=2.0, until=5.0)) == [1.5, 3.0]
    assert percentile([3, 1, 2], 0.99) == 3 and percentile([3, 1, 2], 0.5) == 2


def times(p99: float, baseline: float = 10.0, seconds: float = 2.0) -> StallTimes:
    return StallTimes(baseline=baseline, overall=12.0, p99=p99, longest=99.0, ttft=90.0, seconds=seconds, budget=64)


def test_ratios_are_taken_within_a_run_and_a_round():
    whole = [times(900), times(900, seconds=4.0), times(900, seconds=8.0)]
    runs = [times(20), times(60, baseline=20.0, seconds=5.0), times(40, baseline=40.0, seconds=8.0)]
    assert median_of(runs).p99 == 40 and median_of(runs).baseline == 20
    result = result_of("64", runs, whole)
    assert result.gap == 2.0, "the rounds' ratios are 2, 3 and 1"
    assert result.throughput == 1.0, "the rounds' ratios are 1, 0.8 and 1"


def test_the_goal_wants_short_gaps_and_throughput():
    assert StallResult("64", times(19), 1.9, 0.95).meets_the_goal
    assert not StallResult("64", times(21), 2.1, 0.95).meets_the_goal
    assert not StallResult("64", times(19), 1.9, 0.85).meets_the_goal


def test_baseline_gaps_are_before_the_prompt_and_after_it(loaded, monkeypatch):
    clock = {"now": 0.0}

    def step(engine, token_times):
        """A step takes a second, 3 while there is a prompt to read, 1.5 once there was one."""
        talking = "long" not in engine.request_ids()
        outputs = engine.step()
        clock["now"] += 1.0 if talking and not clock.get("read") else 1.5 if talking else 3.0
        clock["read"] = clock.get("read") or not talking
        for output in outputs:
            token_times.setdefault(output.request_id, []).append(clock["now"])

    monkeypatch.setattr(chunking, "step", step)
    monkeypatch.setattr(chunking.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(chunking, "BASELINE_STEPS", 4)
    run = chunking.serve("8", loaded, StallWorkload([[1, 2, 3], [4, 5]], list(range(1, 31)), 40))
    assert run.baseline == 1250.0, "four of a second, four of one and a half, for both"
    assert run.p99 == run.longest == 3000.0 and run.ttft == 5 * 3000.0


def test_the_command_prints_every_setting_with_its_run_info(loaded, monkeypatch, capsys):
    monkeypatch.setattr(chunking, "load", lambda *_: loaded)
    size = ["--streams", "3", "--stream-tokens", "9", "--prompt-tokens", "60"]
    command = ["bench", "chunking", *size, "--budgets", "9", "20", "--rounds", "1"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["setting"] for result in report["results"]] == ["whole", "9", "20", "auto"]
    assert report["machine"] and report["versions"]["torch"] and report["goal"]["throughput_loss"] == 0.1
    whole, smallest = report["results"][:2]
    assert whole["throughput_of_whole"] == 1.0 and smallest["budget"] == 9
    assert all(0 < r["baseline"] and 0 < r["p99"] <= r["longest"] <= r["ttft"] + 0.2 for r in report["results"])
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 1


def test_a_budget_that_leaves_prompts_nothing_is_refused(capsys):
    assert main(["bench", "chunking", "--streams", "10", "--budgets", "10"]) == 2
    assert "--budgets has 10; each must be above --streams, 10." in capsys.readouterr().err


@pytest.mark.parametrize("setting", [WHOLE, "8", AUTO])
def test_prefill_of_all_streams_takes_one_step_whatever_the_setting(loaded, setting):
    work = StallWorkload([list(range(1, 60)), list(range(2, 70))], [1, 2, 3], 4)
    engine, token_times = engine_for(setting, loaded, work), {}
    before = engine.scheduler.max_num_batched_tokens, engine.budget
    chunking.prefill_streams(engine, work, token_times)
    assert {name: len(times) for name, times in token_times.items()} == {"s0": 1, "s1": 1}
    assert (engine.scheduler.max_num_batched_tokens, engine.budget) == before
    engine.check_integrity()
