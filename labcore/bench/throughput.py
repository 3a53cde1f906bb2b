"""Throughput: tokens per second of labcore's engine and of transformers, with the same model and requests.

Systems alternate, round after round, in one process, so that machine drift affects all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from labcore.bench.arguments import at_least_one
from labcore.bench.run_info import run_info
from labcore.llm import LLM
from labcore.models import resolve
from labcore.sampling_params import SamplingParams
from labcore.workload.synthetic import Workload, lognormal_workload


@dataclass
class ThroughputResult:
    """One system: seconds of each round, and requested output tokens per second in the median round."""

    name: str
    seconds: list[float]
    tokens_per_second: float


def serve_labcore(llm: LLM, work: Workload) -> int:
    """Serve all requests with one engine; return the number of output tokens."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    return sum(len(output.outputs[0].token_ids) for output in llm.generate(work.prompts, params))


def serve_static(model: torch.nn.Module, work: Workload, batch_size: int) -> int:
    """Padded static batches, each run to its longest output; only requested tokens are counted."""
    for start in range(0, len(work.prompts), batch_size):
        prompts = work.prompts[start : start + batch_size]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        steps = max(work.output_lens[start : start + batch_size])
        config = GenerationConfig(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, generation_config=config)
    return work.num_output_tokens


def serve_continuous(model: torch.nn.Module, work: Workload) -> int:
    """Continuous batching of transformers, each request with its own output length."""
    config = GenerationConfig(max_new_tokens=max(work.output_lens), do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=2048, num_blocks=256, max_memory_percent=0.5)
    done = 0
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        for prompt, n in zip(work.prompts, work.output_lens, strict=True):
            manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
        finished = 0
        while finished < len(work.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.status == RequestStatus.FINISHED:
                finished += 1
                done += len(result.generated_tokens)
    return done


def systems(folder: str, names: list[str], settings: dict) -> dict[str, Callable[[Workload], int]]:
    """Name → function that serves a workload and returns the number of requested output tokens."""
    table: dict[str, Callable[[Workload], int]] = {}
    if "labcore" in names:
        llm = LLM(folder, **settings)
        table["labcore"] = lambda work: serve_labcore(llm, work)
    if "static" in names or "continuous" in names:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        if "static" in names:
            table["transformers, static batches of 8"] = lambda work: serve_static(model, work, 8)
            table["transformers, static batches of 32"] = lambda work: serve_static(model, work, 32)
        if "continuous" in names:
            table["transformers, continuous batching"] = lambda work: serve_continuous(model, work)
    return table


def measure(table: dict[str, Callable[[Workload], int]], work: Workload, rounds: int) -> list[ThroughputResult]:
    """Serve the workload `rounds` times with each system in turn, after a short warm-up."""
    warm_up = Workload(work.prompts[:2], [4, 4])
    for serve in table.values():
        serve(warm_up)
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(rounds):
        for name, serve in table.items():
            start = time.perf_counter()
            tokens = serve(work)
            seconds[name].append(round(time.perf_counter() - start, 3))
            if tokens != work.num_output_tokens:
                raise RuntimeError(f"{name} returned {tokens} tokens instead of {work.num_output_tokens}.")
    return [ThroughputResult(name, times, round(work.num_output_tokens / median(times), 1)) for name, times in seconds.items()]


def report(results: list[ThroughputResult], work: Workload) -> dict:
    """The figures as JSON, with machine, versions and workload."""
    return {
        **run_info("engine", torch, transformers, cores=torch.get_num_threads()),
        "workload": {
            "requests": len(work.prompts),
            "prompt_tokens": work.num_prompt_tokens,
            "output_tokens": work.num_output_tokens,
        },
        "results": [asdict(result) for result in results],
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench engine`."""
    parser = subparsers.add_parser("engine", help="tokens per second against transformers, on this machine's CPU")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=at_least_one, default=32)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--only", nargs="+", choices=["labcore", "static", "continuous"], default=None)
    parser.add_argument("--max-num-seqs", type=at_least_one, default=64)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = str(resolve(args.model))
    table = systems(folder, args.only or ["labcore", "static", "continuous"], {"max_num_seqs": args.max_num_seqs})
    vocab_size = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).vocab_size
    work = lognormal_workload(args.requests, vocab_size)
    results = measure(table, work, args.rounds)
    if args.json:
        print(json.dumps(report(results, work), indent=2))
        return 0
    print(f"{len(work.prompts)} requests, {work.num_prompt_tokens} prompt and {work.num_output_tokens} output tokens")
    for result in results:
        print(f"{result.name:<36} {result.tokens_per_second:>7.1f} tok/s   rounds {result.seconds} s")
    return 0
