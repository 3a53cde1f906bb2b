"""A runner without a model: every KV slot remembers the text that it was computed from, and logits follow from the text.

Whoever reads a slot that holds anything but its own text is told so at once, and a run of thousands of steps takes
seconds. Scheduler, prefix cache, sampler, beam search and detokenizer are the engine's own.

    slot 13   ("", (5, 0, 2))     salt "", the KV of token 2 behind 5 and 0
    logits of a text             random numbers that depend on nothing but its tokens
"""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from labcore import LLM, BeamSearchParams, SamplingParams
from labcore.engine.beams import top_logprobs
from labcore.models import LoadedModel
from labcore.request import Request
from labcore.sampling.beam_search import BeamSearch
from labcore.sampling.sampler import Sampler
from labcore.scheduler.plan import SchedulerOutput

VOCAB = 6
END = 5
"""Tokens of the made-up model, and the one of them that ends a text."""


class Letters:
    """A tokenizer with a letter a token: a, b, c, …"""

    added_tokens_decoder: dict = {}
    chat_template = None

    def encode(self, text: str, **options: object) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


@cache
def logits_of(text: tuple[int, ...]) -> Tensor:
    """[VOCAB] float32: what the made-up model thinks comes after a text."""
    rng = np.random.default_rng(zlib.crc32(array("q", text).tobytes()))
    return torch.tensor(rng.normal(0, 2, VOCAB), dtype=torch.float32)


class RememberingRunner:
    """Stands where `ModelRunner` stands. fail_after: tokens of the next step that are computed before it falls over."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.num_computed: dict[str, int] = {}
        self.fail_after: int | None = None

    def run(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> tuple[list[Request], Tensor]:
        """See `ModelRunner.run`."""
        size = self.block_size
        for src, dst in plan.block_copies:
            for offset in range(size):
                self.memory[dst * size + offset] = self.memory.get(src * size + offset, ("nothing", ()))
        caught_up = []
        for request_id, n in plan.num_scheduled_tokens.items():
            request = requests[request_id]
            assert n > 0, f"{request_id} is scheduled for nothing"
            self._compute(request, n)
            if n == request.num_uncomputed_tokens:
                caught_up += [request, *(requests[sibling] for sibling in plan.siblings.get(request_id, ()))]
        assert plan.num_scheduled_tokens, "an empty step"
        self._fall_over_if_asked_to(0)
        texts = [tuple(request.token_ids(0, request.num_tokens)) for request in caught_up]
        return caught_up, torch.stack([logits_of(text) for text in texts]) if texts else torch.empty(0, VOCAB)

    def _compute(self, request: Request, n: int) -> None:
        start, text = request.num_computed_tokens, tuple(request.token_ids(0, request.num_tokens))
        slots = request.table.slot_mapping()
        for p in range(start):
            held = self.memory.get(slots[p])
            assert held == (request.cache_salt, text[: p + 1]), f"{request.request_id} reads {held} at token {p}"
        for p in range(start, start + n):
            self._fall_over_if_asked_to(1)
            self.memory[slots[p]] = (request.cache_salt, text[: p + 1])
        self.num_computed[request.request_id] = self.num_computed.get(request.request_id, 0) + n

    def _fall_over_if_asked_to(self, tokens: int) -> None:
        if self.fail_after is None:
            return
        self.fail_after -= tokens
        if self.fail_after <= 0:
            self.fail_after = None
            raise RuntimeError("the model fell over")


def remembering_llm(loaded: LoadedModel, *, num_blocks: int, block_size: int = 4, **settings: object) -> LLM:
    """An engine whose model remembers texts. `loaded` gives it no more than its shape."""
    loaded = dataclasses.replace(loaded, tokenizer=Letters(), vocab_size=VOCAB, eos_token_ids=(END,))
    llm = LLM(loaded, num_blocks=num_blocks, block_size=block_size, **settings)
    llm.engine.runner = RememberingRunner(block_size)
    return llm


def expected_completion(
    prompt: Sequence[int], params: SamplingParams, seed: int, said: Sequence[int] = ()
) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of one continuation, worked out with no engine: a token at a time, nothing cached.

    said: what it has said when it is forked; `seed` counts from there on.
    """
    request, sampler = Request("r", list(prompt), params, 0, params.max_tokens, seed), Sampler([END])
    tokens = request.output_token_ids
    tokens += said
    while True:
        (drawn,) = sampler(logits_of((*prompt, *tokens))[None], [request])
        tokens.append(drawn.token_id)
        early = len(tokens) < params.min_tokens
        if not early and (drawn.token_id in params.stop_token_ids or (drawn.token_id == END and not params.ignore_eos)):
            return tokens, Letters().decode(tokens[:-1]), "stop"
        text = Letters().decode(tokens)
        ends = [len(stop) for stop in params.stop if text.endswith(stop)]
        if ends and not early:
            return tokens, text[: -max(ends)], "stop"
        if len(tokens) == params.max_tokens:
            return tokens, text, "length"


def expected_beams(prompt: Sequence[int], params: BeamSearchParams) -> list[tuple[int, ...]]:
    """Token ids of the texts that a search finds, best first, worked out with no engine."""
    search = BeamSearch(params, (END,), params.max_tokens)
    while not search.done:
        rows = torch.stack([logits_of((*prompt, *beam.token_ids)) for beam in search.beams])
        search.advance(top_logprobs(rows, [search.num_candidates] * len(search.beams)))
    return [text.token_ids for text in search.best()]
