"""`labcore bench gpu` without a GPU: it says so; and what it would do there works on a tiny plan in the interpreter."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import CONFIGS, NO_SPECIAL_TOKENS

pytest.importorskip("triton", reason="Triton exists for Linux only")

from labcore.attention.kernels.triton_mode import INTERPRETED  # noqa: E402
from labcore.attention.sample_batch import Heads, gathered, paged_problem  # noqa: E402
from labcore.bench.gpu import kernel_figures as gpu_kernels  # noqa: E402
from labcore.bench.gpu.competitors import competitor_results  # noqa: E402
from labcore.bench.gpu.engine_figures import engine_results  # noqa: E402
from labcore.bench.gpu.measurement_plan import EngineSize, Plan, llama_3_1_8b, qwen3_0_6b  # noqa: E402
from labcore.bench.gpu.run import NO_GPU, goals, measure  # noqa: E402
from labcore.bench.gpu.timing import Deadline, DeviceTimes  # noqa: E402
from labcore.cli.main import main  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a tiny plan for a machine without a GPU")


def one_millisecond(run) -> DeviceTimes:
    run()
    return DeviceTimes(1.0, 0.9, 1.1)


def tiny_plan(**changes) -> Plan:
    plan = dict(
        device=torch.device("cpu"),
        dtype=torch.float16,
        check_heads=(Heads(4, 2, 32),),
        decode_seqs=((1, 1), (20, 1)),
        mixed_seqs=((5, 5), (20, 1), (9, 3)),
        heads=Heads(4, 1, 32),
        batches=(1, 2),
        contexts=(16, 40),
        goal_point=(2, 40),
        prefills=((1, 24),),
        engines={"tiny": EngineSize(lambda: CONFIGS["llama"](**NO_SPECIAL_TOKENS), 0.0)},
        requests=2,
        prompt_tokens=6,
        output_tokens=3,
        time_of=one_millisecond,
        copy_gb_per_s=lambda: 1.0,
        free_bytes=lambda: 10**9,
    )
    return Plan(**{**plan, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="is what a machine without a GPU says")
def test_without_a_gpu_the_command_says_so_and_measures_nothing(capsys):
    assert main(["bench", "gpu"]) == NO_GPU
    assert capsys.readouterr().out.startswith("no GPU: ")
    assert main(["bench", "gpu", "--json"]) == NO_GPU
    assert json.loads(capsys.readouterr().out)["device"] is None


def test_a_whole_measurement_runs_through_and_reports_every_section():
    said = []
    plan = tiny_plan(engines={})
    report = json.loads(json.dumps(measure(plan, Deadline(5), said.append)))
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert len(report["checks"]) == 2 + 2 * 4
    assert {(p["batch"], p["context"]) for p in report["decode"]} == {(1, 16), (1, 40), (2, 16), (2, 40)}
    k_and_v = 2 * (2 * 40) * 32 * 2  # bytes of 2 × 40 tokens, one head of 32 in 16 bits
    assert report["decode"][-1]["gb_per_s"] == pytest.approx(k_and_v / 1e6), "in one millisecond"
    assert report["prefill"][0]["length"] == 24
    assert report["goals"]["share_of_copy_met"] is False and report["goals"]["never_below_sdpa"] is True
    assert report["left_out"] == [] and len(said) >= len(report["checks"]) + len(report["decode"])


@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_a_wrong_kernel_is_seen(wrong, monkeypatch):
    problem = paged_problem([(20, 1), (7, 1)], Heads(4, 2, 32), torch.float32, "cpu")
    assert gpu_kernels.attention_check("right", problem, {}).ok
    monkeypatch.setattr(gpu_kernels.TritonAttention, "attend", lambda *_, **__: torch.full((2, 4, 32), wrong))
    assert not gpu_kernels.attention_check("wrong", problem, {}).ok


def test_what_the_budget_does_not_allow_is_named():
    deadline = Deadline(0)
    report = measure(tiny_plan(engines={}), deadline, lambda _: None)
    assert report["decode"] == [] and "decode, 2 × 40" in report["left_out"] and "competitors" in report["left_out"]
    assert report["goals"]["share_of_copy"] is None


def test_what_does_not_fit_into_memory_is_named():
    deadline = Deadline(5)
    plan = tiny_plan(free_bytes=lambda: 30_000, engines={"big": EngineSize(llama_3_1_8b, 28)})
    points = list(gpu_kernels.decode_points(plan, 1.0, deadline))
    assert [(p.batch, p.context) for p in points] == [(1, 16), (1, 40), (2, 16)]
    assert list(engine_results(plan, deadline)) == []
    assert deadline.left_out == ["decode, 2 × 40: not enough memory", "engine big: needs 28 GB of free memory"]


@pytest.mark.parametrize("out", [".", "missing/report.json"])
def test_report_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "gpu", "--out", out]) == 2
    assert f"--out is {out}; it must be a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["gpu", "--minutes", "nan"], "--minutes: it is 'nan'; it must be a number of minutes above 0"),
        (["gpu", "--minutes", "-1"], "--minutes"),
        (["engine", "--rounds", "0"], "--rounds: it is '0'; it must be a whole number of at least 1"),
        (["engine", "--requests", "-2"], "--requests"),
        (["blocks", "--rounds", "1.5"], "--rounds"),
        (["scheduler", "--rounds", "0"], "--rounds"),
        (["recorder", "--requests", "0"], "--requests"),
        (["prefix", "--rounds", "0"], "--rounds"),
        (["chunking", "--streams", "0"], "--streams"),
    ],
)
def test_bench_refuses_numbers_that_measure_nothing(capsys, command, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", *command])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_engines_with_random_weights_are_measured():
    (result,) = engine_results(tiny_plan(dtype=torch.float32), Deadline(5), graphs=(False,))
    assert result.model == "tiny" and len(result.rounds) == 3 and result.tokens_per_second > 0


def test_the_sizes_are_those_of_the_real_models():
    qwen, llama = qwen3_0_6b(), llama_3_1_8b()
    per_layer = [4 * c.hidden_size * c.intermediate_size * 3 / 4 for c in (qwen, llama)]
    assert per_layer == [1024 * 3072 * 3, 4096 * 14_336 * 3]
    assert (qwen.num_hidden_layers, llama.num_hidden_layers) == (28, 32)


def test_tiles_are_tried_and_a_tile_that_fails_is_a_result():
    plan = tiny_plan(goal_point=(1, 16))
    rows = list(gpu_kernels.tile_sweep(plan, 1.0, Deadline(5)))
    assert len(rows) == 54 and all("share_of_copy" in row for row in rows)

    def fail(run):
        raise RuntimeError("out of shared memory")

    rows = list(gpu_kernels.tile_sweep(tiny_plan(goal_point=(1, 16), time_of=fail), 1.0, Deadline(5)))
    assert {row["error"] for row in rows} == {"RuntimeError"}


def test_competitors_that_are_not_installed_are_named():
    assert set(competitor_results(tiny_plan()).values()) == {"not installed"}


def test_a_problem_holds_its_tokens_and_nan_everywhere_else():
    problem = paged_problem([(5, 1), (5, 2)], Heads(4, 2, 8), torch.float32, "cpu", block_size=4)
    k, v = gathered(problem)
    assert k.shape == v.shape == (2, 2, 5, 8) and not k.isnan().any() and not v.isnan().any()
    assert int((~problem.cache.k[0].isnan()).flatten(2).all(2).sum()) == 10
    assert problem.metadata.query_lens_list == [1, 2] and len(problem.metadata.slot_mapping) == 3
    assert problem.kv_bytes == 2 * 10 * 2 * 8 * 4
    last = problem.cache.k[0].flatten(0, 1)[problem.metadata.slot_mapping[0]]
    assert torch.equal(last, k[0, :, 4])


def test_goals_are_judged_where_they_were_measured():
    point = dict(batch=64, context=4096, share_of_copy=0.9, speed_against_sdpa=1.5)
    assert goals([point], (64, 4096))["share_of_copy_met"] is True
    assert goals([{**point, "speed_against_sdpa": 0.8}], (64, 4096))["never_below_sdpa"] is False
    assert goals([], (64, 4096)) == dict.fromkeys(goals([], (64, 4096)))
