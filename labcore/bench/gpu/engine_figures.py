"""Engine throughput on a GPU: random weights in the shape of real models, with and without CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from labcore.bench.gpu.measurement_plan import Plan
from labcore.bench.gpu.timing import Deadline
from labcore.llm import LLM
from labcore.models import from_model
from labcore.sampling_params import SamplingParams

ROUNDS = 3


@dataclass(frozen=True)
class EngineResult:
    """Output tokens per second of each round, and the median."""

    model: str
    cuda_graphs: bool
    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: list[float]
    tokens_per_second: float


def engine_results(plan: Plan, deadline: Deadline, graphs: tuple[bool, ...] = (False, True)) -> Iterator[EngineResult]:
    """Measure every model size that fits memory and deadline."""
    for name, size in plan.engines.items():
        if plan.free_bytes() < size.gigabytes * 1e9:
            deadline.left_out.append(f"engine {name}: needs {size.gigabytes} GB of free memory")
        elif deadline.allows(f"engine {name}", 75):
            with torch.device(plan.device):
                model = AutoModelForCausalLM.from_config(size.config(), dtype=plan.dtype).requires_grad_(False)
            for cuda_graphs in graphs:
                if deadline.allows(f"engine {name}, cuda_graphs={cuda_graphs}", 35):
                    yield engine_result(plan, name, model, cuda_graphs)
            del model
            torch.cuda.empty_cache()


def engine_result(plan: Plan, name: str, model: torch.nn.Module, cuda_graphs: bool) -> EngineResult:
    """Serve all requests at once with greedy sampling, several times, after a warm-up that compiles and captures."""
    longest = plan.prompt_tokens + plan.output_tokens
    llm = LLM(
        from_model(model, name=name),
        num_blocks=plan.requests * (longest // 16 + 2),
        max_num_seqs=plan.requests,
        max_model_len=longest,
        enable_prefix_caching=False,
        cuda_graphs=cuda_graphs,
    )
    gen = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    prompts = torch.randint(0, vocab_size, (plan.requests, plan.prompt_tokens), generator=gen).tolist()

    def serve(num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        tokens = sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params))
        return tokens / (time.perf_counter() - start)

    serve(min(8, plan.output_tokens))
    speeds = [round(serve(plan.output_tokens), 1) for _ in range(ROUNDS)]
    shape = plan.requests, plan.prompt_tokens, plan.output_tokens
    return EngineResult(name, cuda_graphs, *shape, rounds=speeds, tokens_per_second=median(speeds))
