"""The request log that throughput is measured on: lengths as a chat service sees them, prompts that share nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the start. `output_lens[i]` tokens are generated for `prompts[i]`, no end token."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def lognormal_workload(num_requests: int, vocab_size: int, seed: int = 4) -> Workload:
    """Log-normal lengths, prompts of 95 tokens and outputs of 57 on average, random token ids.

    No two prompts begin alike, so a prefix cache finds nothing and every prompt token is computed.
    """
    rng = np.random.default_rng(seed)
    prompt_lens = rng.lognormal(mean=4.35, sigma=0.7, size=num_requests).clip(4, 1024).astype(int)
    output_lens = rng.lognormal(mean=3.8, sigma=0.7, size=num_requests).clip(4, 512).astype(int)
    prompts = [rng.integers(10, vocab_size, size=n).tolist() for n in prompt_lens]
    return Workload(prompts, output_lens.tolist())
