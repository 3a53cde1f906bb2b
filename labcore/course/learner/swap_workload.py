"""The workload of the hot-swap test: it reaches every part of the engine, and its texts don't depend on the plan.

    at once      eight greedy prompts, more than the pool holds
    step 2       two samples of one prompt           step 3   a beam search, two beams wide
    later        r0 is forked at its third token, in the middle of a block
    step 6       an urgent request                   step 9   a prompt that was there before: prefix hits
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labcore.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from labcore.engine.engine import Engine, Params
    from labcore.outputs import RequestOutput

PROMPTS = (
    "The capital of France is",
    "A block table maps logical blocks to",
    "Once upon a time, in a small village by the sea, there lived an old man who could not sleep. Every night he",
    "def fibonacci(n):",
    "Three things to know about memory: first, it is never enough; second, most of it lies idle; third,",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick brown",
    "List five animals that live in the forest:",
)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
FORKED, FORK_AT = "r0", 3  # by tokens, not by steps: a part that plans otherwise forks the same text


@dataclass(frozen=True)
class Arrival:
    """A request that is added before step `step`, from 0."""

    step: int
    request_id: str
    prompt: str
    params: Params
    priority: int = 0


ARRIVALS = (
    *(Arrival(0, f"r{number}", prompt, GREEDY, priority=1) for number, prompt in enumerate(PROMPTS)),
    Arrival(2, "pair", PROMPTS[1], SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True), priority=1),
    Arrival(3, "beams", PROMPTS[5], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True), priority=1),
    Arrival(6, "urgent", PROMPTS[3], GREEDY),
    Arrival(9, "again", PROMPTS[2], GREEDY, priority=1),
)


@dataclass
class SwapWorkload:
    """Feeds one engine. waiting: what has still to arrive; step: steps that were made."""

    engine: Engine
    waiting: list[Arrival] = field(default_factory=lambda: list(ARRIVALS))
    step: int = 0

    def has_more(self) -> bool:
        return bool(self.waiting) or self.engine.has_unfinished_requests()

    def steps(self, max_steps: int) -> Iterator[list[RequestOutput]]:
        """Step until everything is served, or `max_steps` times; yields the outputs of each step."""
        while self.has_more() and self.step < max_steps:
            for arrival in [each for each in self.waiting if each.step <= self.step]:
                tokens = encode(self.engine, arrival.prompt)
                self.engine.add_request(arrival.request_id, tokens, arrival.params, priority=arrival.priority)
                self.waiting.remove(arrival)
            outputs = self.engine.step()
            self.step += 1
            for output in outputs:
                if output.request_id == FORKED and len(output.outputs[0].token_ids) == FORK_AT:
                    self.engine.fork(FORKED, f"{FORKED}-fork", temperature=1.0, seed=3)
            yield outputs


def encode(engine: Engine, prompt: str) -> list[int]:
    """Token ids of a prompt; of its bytes for a model without a tokenizer."""
    loaded = engine.loaded
    if loaded.tokenizer is None:
        return [byte % loaded.vocab_size for byte in prompt.encode()[:40]]
    return loaded.tokenizer.encode(prompt)
