"""Cost of the flight recorder: its share of the engine's time, and bytes on disk per step."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers

from labcore import LLM, SamplingParams
from labcore.bench.arguments import at_least_one
from labcore.bench.run_info import run_info
from labcore.models import LoadedModel, load
from labcore.recorder import Recorder
from labcore.workload.synthetic import lognormal_workload

GOAL_SHARE, GOAL_MB = 0.05, 50


class TimedRecorder:
    """Wraps a recorder and sums the wall-clock seconds of its calls."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.spent = 0.0

    def __getattr__(self, name: str) -> object:
        member = getattr(self.recorder, name)
        if not callable(member):
            return member

        def timed(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return member(*arguments)
            finally:
                self.spent += time.perf_counter() - start

        return timed


def cost(loaded: LoadedModel, num_requests: int = 32) -> dict[str, float]:
    """Serve a workload once: the recorder's share of the time, timer included, and megabytes per 10,000 steps."""
    work = lognormal_workload(num_requests, loaded.vocab_size)
    llm = LLM(loaded, record=True)
    timed = llm.engine.recorder = TimedRecorder(llm.engine.recorder)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    start = time.perf_counter()
    llm.generate(work.prompts, params)
    total = time.perf_counter() - start
    steps = len(timed.recorder.steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        timed.recorder.save(path)
        size = path.stat().st_size
    return {
        "share": timed.spent / total,
        "recorder_ms_per_step": 1000 * timed.spent / steps,
        "engine_s": total,
        "steps": steps,
        "mb_per_10000_steps": size / steps * 10_000 / 1e6,
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench recorder`."""
    parser = subparsers.add_parser("recorder", help="flight recorder: share of the engine's time, size of a run's file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=at_least_one, default=32)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results = cost(load(args.model), args.requests)
    if args.json:
        report = run_info("recorder", torch, transformers, cores=torch.get_num_threads())
        goal = {"share_below": GOAL_SHARE, "mb_per_10000_steps_below": GOAL_MB}
        print(json.dumps({**report, "results": results, "goal": goal}, indent=2))
        return 0
    print(f"recorder   {results['share']:.2%} of the engine's time (goal: below {GOAL_SHARE:.0%}), "
          f"{results['recorder_ms_per_step']:.2f} ms a step")  # fmt: skip
    print(f"file       {results['mb_per_10000_steps']:.1f} MB for 10,000 such steps (goal: below {GOAL_MB})")
    return 0
