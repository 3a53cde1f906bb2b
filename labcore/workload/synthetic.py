"""Synthetic workload: log-normal lengths as in chat traffic, prompts without common prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at time 0; `output_lens[i]` tokens are generated for `prompts[i]`, ignoring end tokens."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def lognormal_workload(num_requests: int, vocab_size: int, seed: int = 4) -> Workload:
    """Log-normal lengths (prompts of 95 tokens, outputs of 57 on average) and random token ids.

    No two prompts have a common prefix, so a prefix cache never hits.
    """
    rng = np.random.default_rng(seed)
    prompt_lens = rng.lognormal(mean=4.35, sigma=0.7, size=num_requests).clip(4, 1024).astype(int)
    output_lens = rng.lognormal(mean=3.8, sigma=0.7, size=num_requests).clip(4, 512).astype(int)
    prompts = [rng.integers(10, vocab_size, size=n).tolist() for n in prompt_lens]
    return Workload(prompts, output_lens.tolist())
