"""What a long prompt does to those who are talking, and what it costs to spare them: whole prompts, budgets, "auto".

    streams   ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒     ten that decode
    prompt              ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓                   4,096 tokens arrive in the middle
                 calm │ while it is read │ calm

Every setting serves the same work: the same prompts, so many tokens for each stream that all of them talk until the
prompt is read, and for a while after, whatever the budget. The streams were asked what people ask (the median prompt of
the Azure conversation trace has 1,020 tokens), and it is read before the clock starts.

A gap is the time between two tokens of one stream; the gaps of all are pooled. Calm are those of `CALM_STEPS` steps
before the prompt came, and of as many after it was read: the streams have grown by then, and look back at more
themselves, which is not the prompt's fault.

The settings take turns, round after round, so that a machine that grows slower does so for all of them. A figure is the
median of its rounds, a ratio the median of the rounds' ratios. "auto" begins anew in each round, and aims at `AIM` times
the gaps that this very engine had before the prompt came.
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

from labcore.bench.run_info import circumstances
from labcore.engine.engine import Engine
from labcore.llm import LLM
from labcore.models import LoadedModel, load
from labcore.sampling_params import SamplingParams
from labcore.scheduler.budget import AdaptiveBudget
from labcore.viz.cdf import percentile

BUDGETS = (32, 48, 64, 96, 128, 256, 1024)
WHOLE, AUTO = "whole", "auto"
CALM_STEPS, BLOCK_SIZE = 32, 16
GOAL_GAP, GOAL_LOSS = 2.0, 0.10
AIM = 1.6
"""What "auto" aims at, in calm medians: below the goal, because single steps scatter around what it finds."""


@dataclass(frozen=True)
class Work:
    """`streams` prompts, each with `output_tokens` to say, and one long prompt that wants one token."""

    streams: list[list[int]]
    long: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Times:
    """One run. Milliseconds but for `seconds`.

    calm      median gap of the streams while there is no prompt: just before it came, and just after it was read
    overall   median gap over the whole run
    p99, longest   gaps that end while the prompt is read
    ttft      from the prompt's arrival to its token
    seconds   the whole of the work but for the streams' prompts
    budget    tokens of the largest step after the prompt came
    """

    calm: float
    overall: float
    p99: float
    longest: float
    ttft: float
    seconds: float
    budget: int


@dataclass(frozen=True)
class Result:
    """One setting. Each figure is the median over its rounds.

    gap          P99 of the gaps while the prompt is read, in calm medians of the same run
    throughput   relative to whole prompts in the same round
    """

    setting: str
    times: Times
    gap: float
    throughput: float

    @property
    def meets_the_goal(self) -> bool:
        return self.gap <= GOAL_GAP and self.throughput >= 1 - GOAL_LOSS


def make_work(
    vocab_size: int, num_streams: int, stream_tokens: int, prompt_tokens: int, budgets: Sequence[int], seed: int = 0
) -> Work:
    """Random tokens, no two prompts alike; streams long enough to outlast the prompt under the smallest budget."""
    rng = np.random.default_rng(seed)
    lengths = [stream_tokens] * num_streams + [prompt_tokens]
    *streams, long = (rng.integers(10, vocab_size, size=n).tolist() for n in lengths)
    fewest = max(1, min(AdaptiveBudget(1.0).smallest, *(budget - num_streams for budget in budgets)))
    return Work(streams, long, 2 * CALM_STEPS + 8 + ceil(prompt_tokens / fewest))


def engine_for(setting: str, loaded: LoadedModel, work: Work) -> Engine:
    """An engine that treats prompts as `setting` says: "whole", "auto", or a budget."""
    longest = [len(work.long) + 1, *(len(prompt) + work.output_tokens for prompt in work.streams)]
    settings: dict[str, Any] = {"max_num_batched_tokens": setting if setting == AUTO else len(work.long) + 256}
    if setting == WHOLE:
        settings["enable_chunked_prefill"] = False
    elif setting != AUTO:
        settings["max_num_batched_tokens"] = int(setting)
    num_blocks = sum(n // BLOCK_SIZE + 2 for n in longest)
    return LLM(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False, **settings).engine


def serve(setting: str, loaded: LoadedModel, work: Work) -> Times:
    """One run: the streams talk, the prompt arrives, everybody is served to the end."""
    engine, came = engine_for(setting, loaded, work), {}
    begin(engine, work, came)
    start = time.perf_counter()
    while min(map(len, came.values())) <= CALM_STEPS:
        step(engine, came)
    before = gaps(times[-CALM_STEPS - 1 :] for times in came.values())
    if engine.budget is not None:
        engine.budget.target = AIM * median(before)
    arrived, largest = time.perf_counter(), 0
    engine.add_request("long", work.long, SamplingParams(temperature=0, max_tokens=1))
    while "long" not in came:
        step(engine, came)
        largest = max(largest, engine.scheduler.max_num_batched_tokens)
    (done,) = came.pop("long")
    stalled = gaps(came.values(), after=arrived, until=done)
    while engine.has_unfinished_requests():
        step(engine, came)
    seconds = time.perf_counter() - start
    after = gaps([moment for moment in times if moment >= done][: CALM_STEPS + 1] for times in came.values())
    figures = (median(before + after), median(gaps(came.values())), percentile(stalled, 0.99), max(stalled), done - arrived)
    return Times(*(round(1000 * figure, 1) for figure in figures), round(seconds, 3), largest)


def begin(engine: Engine, work: Work, came: dict[str, list[float]]) -> None:
    """Read the streams' prompts in one step, whatever the setting: all of them begin to talk at the same time."""
    params = SamplingParams(temperature=0, max_tokens=work.output_tokens, ignore_eos=True)
    for number, prompt in enumerate(work.streams):
        engine.add_request(f"s{number}", prompt, params)
    budget, tokens = engine.budget, engine.scheduler.max_num_batched_tokens
    engine.budget, engine.scheduler.max_num_batched_tokens = None, sum(map(len, work.streams))
    step(engine, came)
    engine.budget, engine.scheduler.max_num_batched_tokens = budget, tokens


def step(engine: Engine, came: dict[str, list[float]]) -> None:
    """One step; notes when each request's token came."""
    outputs = engine.step()
    now = time.perf_counter()
    for output in outputs:
        came.setdefault(output.request_id, []).append(now)


def gaps(streams: Iterable[Sequence[float]], after: float = -inf, until: float = inf) -> list[float]:
    """The times between two tokens of a stream, of all streams; those that end after, and until, some moments."""
    both = [pair for times in streams for pair in zip(times, times[1:], strict=False)]
    return [now - before for before, now in both if after < now <= until]


def measure(loaded: LoadedModel, work: Work, budgets: Sequence[int], rounds: int) -> list[Result]:
    """Every setting in turn, `rounds` times; the first run of all, a small one, is not counted."""
    settings = [WHOLE, *map(str, budgets), AUTO]
    serve(WHOLE, loaded, Work(work.streams[:2], work.long[:64], CALM_STEPS + 4))
    runs: dict[str, list[Times]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            runs[setting].append(serve(setting, loaded, work))
    return [result_of(setting, times, runs[WHOLE]) for setting, times in runs.items()]


def result_of(setting: str, runs: Sequence[Times], whole: Sequence[Times]) -> Result:
    """A setting's rounds, beside those of whole prompts."""
    gap = median(run.p99 / run.calm for run in runs)
    throughput = median(other.seconds / run.seconds for run, other in zip(runs, whole, strict=True))
    return Result(setting, median_of(runs), round(gap, 3), round(throughput, 4))


def median_of(runs: Sequence[Times]) -> Times:
    """Each figure's median by itself."""
    return Times(*(median(getattr(run, field.name) for run in runs) for field in fields(Times)))


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench chunking`."""
    parser = subparsers.add_parser("chunking", help="gaps of running streams while a long prompt comes, by budget")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--stream-tokens", type=int, default=1024, help="prompt of each stream (1024)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="the long prompt (4096)")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.streams, args.stream_tokens, args.prompt_tokens, args.rounds) < 1 or min(args.budgets) <= args.streams:
        raise ValueError("streams, their tokens, prompt-tokens and rounds must be at least 1, each budget above the streams.")
    loaded = load(args.model, "auto", "auto")
    work = make_work(loaded.vocab_size, args.streams, args.stream_tokens, args.prompt_tokens, args.budgets)
    results = measure(loaded, work, args.budgets, args.rounds)
    print(json.dumps(report(results, work, args.rounds), indent=2) if args.json else table(results, work))
    return 0


def report(results: Sequence[Result], work: Work, rounds: int) -> dict:
    """Everything that a reader needs in order to judge the figures."""
    return {
        **circumstances("chunking", torch, transformers, cores=torch.get_num_threads()),
        "workload": {
            "streams": len(work.streams),
            "stream_prompt_tokens": len(work.streams[0]),
            "stream_output_tokens": work.output_tokens,
            "long_prompt_tokens": len(work.long),
            "calm_steps": CALM_STEPS,
            "rounds": rounds,
        },
        "goal": {"p99_gap_in_calm_medians": GOAL_GAP, "throughput_loss": GOAL_LOSS},
        "auto_aims_at_calm_medians": AIM,
        "units": "milliseconds; seconds for the whole of the work; budget in tokens",
        "results": [
            {
                "setting": result.setting,
                **asdict(result.times),
                "p99_in_calm_medians": result.gap,
                "p99_in_overall_medians": round(result.times.p99 / result.times.overall, 3),
                "throughput_of_whole": result.throughput,
                "meets_the_goal": result.meets_the_goal,
            }
            for result in results
        ],
    }


def table(results: Sequence[Result], work: Work) -> str:
    """A line a setting, and whether any meets the goal."""
    lines = [
        f"{len(work.streams)} streams, {len(work.streams[0]):,} tokens asked and {work.output_tokens} told; "
        f"a prompt of {len(work.long):,} tokens arrives",
        "setting     calm median gap   P99 while it is read      longest        its TTFT   throughput   goal",
    ]
    for result in results:
        times = result.times
        lines.append(
            f"{result.setting:8} {times.calm:12.1f} ms {times.p99:12.1f} ms = {result.gap:5.2f} × {times.longest:10.1f} ms"
            f" {times.ttft:12.0f} ms {result.throughput:10.1%}   {'met' if result.meets_the_goal else '-'}"
        )
    met = [result.setting for result in results if result.meets_the_goal]
    lines.append(
        f"goal, P99 at most {GOAL_GAP:g} × the calm median, at {GOAL_LOSS:.0%} less throughput at most: "
        + (f"met by {', '.join(met)}" if met else "missed by all")
    )
    return "\n".join(lines)
