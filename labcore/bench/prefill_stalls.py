"""Prefill stalls: how a long prompt delays running decodes, under whole prompts, token budgets and "auto".

    streams   ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒     ten decoding requests
    prompt              ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓                   4,096 tokens arrive in the middle
               baseline │     prefill    │ baseline

Every setting serves the same work: the same prompts, and output lengths for which all streams decode during the whole
prefill and some time after it, whatever the budget. The streams' prompts have about the median length of the Azure
conversation trace (1,020 tokens) and are prefilled before the clock starts.

A gap is the time between two tokens of one stream; the gaps of all streams are pooled. The baseline pools
`BASELINE_STEPS` steps before the prompt arrives and as many after its prefill: the streams' contexts grow meanwhile, and
that slowdown is not caused by the prompt.

Settings alternate, round after round, so that machine drift affects all of them. A figure is the median of its rounds, a
ratio the median of the rounds' ratios. "auto" starts afresh in each round and targets `TARGET` times the median gap
that this engine had before the prompt arrived.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, inf
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from labcore.bench.arguments import at_least_one
from labcore.bench.run_info import run_info
from labcore.engine.engine import Engine
from labcore.llm import LLM
from labcore.models import LoadedModel, load
from labcore.sampling_params import SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.workload.metrics import percentile

BUDGETS = (32, 48, 64, 96, 128, 256, 1024)
WHOLE, AUTO = "whole", "auto"
BASELINE_STEPS, BLOCK_SIZE = 32, 16
GOAL_GAP, GOAL_LOSS = 2.0, 0.10
TARGET = 1.6
"""Target of "auto" in baseline medians: below the goal, because single steps scatter around it."""


@dataclass(frozen=True)
class StallWorkload:
    """Prompts of the `streams`, each to generate `output_tokens`, and one `long` prompt to generate one token."""

    streams: list[list[int]]
    long: list[int]
    output_tokens: int


@dataclass(frozen=True)
class StallTimes:
    """One run, in milliseconds except for `seconds` and `budget`.

    baseline       median gap of the streams just before the prompt arrives and just after its prefill
    overall        median gap over the whole run
    p99, longest   of the gaps that end during the prefill
    ttft           of the long prompt
    seconds        whole run without the prefill of the streams
    budget         tokens of the largest step after the prompt arrived
    """

    baseline: float
    overall: float
    p99: float
    longest: float
    ttft: float
    seconds: float
    budget: int


@dataclass(frozen=True)
class StallResult:
    """One setting. Each figure is the median over its rounds.

    gap          P99 of the gaps during the prefill, in baseline medians of the same run
    throughput   relative to whole prompts in the same round
    """

    setting: str
    times: StallTimes
    gap: float
    throughput: float

    @property
    def meets_the_goal(self) -> bool:
        return self.gap <= GOAL_GAP and self.throughput >= 1 - GOAL_LOSS


def make_workload(
    vocab_size: int, num_streams: int, stream_tokens: int, prompt_tokens: int, budgets: Sequence[int], seed: int = 0
) -> StallWorkload:
    """Random distinct prompts; the streams outlast the prefill under the smallest budget."""
    rng = np.random.default_rng(seed)
    lengths = [stream_tokens] * num_streams + [prompt_tokens]
    *streams, long = (rng.integers(10, vocab_size, size=n).tolist() for n in lengths)
    fewest = max(1, min(AdaptiveBudget(1.0).smallest, *(budget - num_streams for budget in budgets)))
    return StallWorkload(streams, long, 2 * BASELINE_STEPS + 8 + ceil(prompt_tokens / fewest))


def engine_for(setting: str, loaded: LoadedModel, work: StallWorkload) -> Engine:
    """An engine for `setting`: "whole" prompts, "auto", or a token budget."""
    longest = [len(work.long) + 1, *(len(prompt) + work.output_tokens for prompt in work.streams)]
    settings: dict[str, Any] = {"max_num_batched_tokens": setting if setting == AUTO else len(work.long) + 256}
    if setting == WHOLE:
        settings["enable_chunked_prefill"] = False
    elif setting != AUTO:
        settings["max_num_batched_tokens"] = int(setting)
    num_blocks = sum(n // BLOCK_SIZE + 2 for n in longest)
    return LLM(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False, **settings).engine


def serve(setting: str, loaded: LoadedModel, work: StallWorkload) -> StallTimes:
    """One run: the streams decode, the long prompt arrives, all requests finish."""
    engine, token_times = engine_for(setting, loaded, work), {}
    prefill_streams(engine, work, token_times)
    start = time.perf_counter()
    while min(map(len, token_times.values())) <= BASELINE_STEPS:
        step(engine, token_times)
    before = gaps(times[-BASELINE_STEPS - 1 :] for times in token_times.values())
    if engine.budget is not None:
        engine.budget.target = TARGET * median(before)
    arrived, largest = time.perf_counter(), 0
    engine.add_request("long", work.long, SamplingParams(temperature=0, max_tokens=1))
    while "long" not in token_times:
        step(engine, token_times)
        largest = max(largest, token_budget(engine))
    (done,) = token_times.pop("long")
    stalled = gaps(token_times.values(), after=arrived, until=done)
    while engine.has_unfinished_requests():
        step(engine, token_times)
    seconds = time.perf_counter() - start
    after = gaps([moment for moment in times if moment >= done][: BASELINE_STEPS + 1] for times in token_times.values())
    overall = gaps(token_times.values())
    figures = (median(before + after), median(overall), percentile(stalled, 0.99), max(stalled), done - arrived)
    return StallTimes(*(round(1000 * figure, 1) for figure in figures), round(seconds, 3), largest)


def prefill_streams(engine: Engine, work: StallWorkload, token_times: dict[str, list[float]]) -> None:
    """Prefill all streams in one step, whatever the setting, so that they start to decode together."""
    params = SamplingParams(temperature=0, max_tokens=work.output_tokens, ignore_eos=True)
    for number, prompt in enumerate(work.streams):
        engine.add_request(f"s{number}", prompt, params)
    budget, tokens = engine.budget, engine.scheduler.max_num_batched_tokens
    engine.budget, engine.scheduler.max_num_batched_tokens = None, sum(map(len, work.streams))
    step(engine, token_times)
    engine.budget, engine.scheduler.max_num_batched_tokens = budget, tokens


def token_budget(engine: Engine) -> int:
    """Most tokens of the next step while requests decode."""
    if engine.budget is None:
        return engine.scheduler.max_num_batched_tokens
    return engine.budget.tokens(len(engine.scheduler.running))


def step(engine: Engine, token_times: dict[str, list[float]]) -> None:
    """Run one engine step and record the time of each token."""
    outputs = engine.step()
    now = time.perf_counter()
    for output in outputs:
        token_times.setdefault(output.request_id, []).append(now)


def gaps(streams: Iterable[Sequence[float]], after: float = -inf, until: float = inf) -> list[float]:
    """Times between two tokens of a stream, pooled; only gaps that end in (after, until]."""
    both = [pair for times in streams for pair in zip(times, times[1:], strict=False)]
    return [now - before for before, now in both if after < now <= until]


def measure(loaded: LoadedModel, work: StallWorkload, budgets: Sequence[int], rounds: int) -> list[StallResult]:
    """Run all settings in turn, `rounds` times, after one small warm-up run."""
    settings = [WHOLE, *map(str, budgets), AUTO]
    serve(WHOLE, loaded, StallWorkload(work.streams[:2], work.long[:64], BASELINE_STEPS + 4))
    runs: dict[str, list[StallTimes]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            runs[setting].append(serve(setting, loaded, work))
    return [result_of(setting, times, runs[WHOLE]) for setting, times in runs.items()]


def result_of(setting: str, runs: Sequence[StallTimes], whole: Sequence[StallTimes]) -> StallResult:
    """Summarize the rounds of one setting, relative to those of whole prompts."""
    gap = median(run.p99 / run.baseline for run in runs)
    throughput = median(other.seconds / run.seconds for run, other in zip(runs, whole, strict=True))
    return StallResult(setting, median_of(runs), round(gap, 3), round(throughput, 4))


def median_of(runs: Sequence[StallTimes]) -> StallTimes:
    """Median of each field separately."""
    return StallTimes(*(median(getattr(run, field.name) for run in runs) for field in fields(StallTimes)))


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench chunking`."""
    parser = subparsers.add_parser("chunking", help="gaps of decoding streams during the prefill of a long prompt, by budget")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=at_least_one, default=10)
    parser.add_argument("--stream-tokens", type=at_least_one, default=1024, help="prompt of each stream (1024)")
    parser.add_argument("--prompt-tokens", type=at_least_one, default=4096, help="the long prompt (4096)")
    parser.add_argument("--budgets", type=at_least_one, nargs="+", default=list(BUDGETS))
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.budgets) <= args.streams:
        raise ValueError(f"--budgets has {min(args.budgets)}; each must be above --streams, {args.streams}.")
    loaded = load(args.model, "auto", "auto")
    work = make_workload(loaded.vocab_size, args.streams, args.stream_tokens, args.prompt_tokens, args.budgets)
    results = measure(loaded, work, args.budgets, args.rounds)
    print(json.dumps(report(results, work, args.rounds), indent=2) if args.json else table(results, work))
    return 0


def report(results: Sequence[StallResult], work: StallWorkload, rounds: int) -> dict:
    """The figures as JSON, with machine, versions and workload."""
    return {
        **run_info("chunking", torch, transformers, cores=torch.get_num_threads()),
        "workload": {
            "streams": len(work.streams),
            "stream_prompt_tokens": len(work.streams[0]),
            "stream_output_tokens": work.output_tokens,
            "long_prompt_tokens": len(work.long),
            "baseline_steps": BASELINE_STEPS,
            "rounds": rounds,
        },
        "goal": {"p99_gap_in_baseline_medians": GOAL_GAP, "throughput_loss": GOAL_LOSS},
        "auto_target_in_baseline_medians": TARGET,
        "units": "milliseconds; seconds for the whole of the work; budget in tokens",
        "results": [
            {
                "setting": result.setting,
                **asdict(result.times),
                "p99_in_baseline_medians": result.gap,
                "p99_in_overall_medians": round(result.times.p99 / result.times.overall, 3),
                "throughput_of_whole": result.throughput,
                "meets_the_goal": result.meets_the_goal,
            }
            for result in results
        ],
    }


def table(results: Sequence[StallResult], work: StallWorkload) -> str:
    """One line per setting, and which settings meet the goal."""
    lines = [
        f"{len(work.streams)} streams, {len(work.streams[0]):,} tokens of prompt and {work.output_tokens} of output each; "
        f"a prompt of {len(work.long):,} tokens arrives",
        "setting     baseline median    P99 during prefill      longest        its TTFT   throughput   goal",
    ]
    for result in results:
        times = result.times
        lines.append(
            f"{result.setting:8} {times.baseline:12.1f} ms {times.p99:12.1f} ms = {result.gap:5.2f} × {times.longest:10.1f} ms"
            f" {times.ttft:12.0f} ms {result.throughput:10.1%}   {'met' if result.meets_the_goal else '-'}"
        )
    met = [result.setting for result in results if result.meets_the_goal]
    lines.append(
        f"goal, P99 at most {GOAL_GAP:g} × the baseline median, at {GOAL_LOSS:.0%} less throughput at most: "
        + (f"met by {', '.join(met)}" if met else "missed by all")
    )
    return "\n".join(lines)
