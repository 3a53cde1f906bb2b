"""Engines for tests: a pool whose every unowned slot is NaN, a shuffled free list, and a run that audits each step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from labcore.attention.backend import AttentionBackend
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.tensors import KVCache
from labcore.llm import LLM
from labcore.models import LoadedModel


class PoisonedPool(BlockPool):
    """Knows the blocks that nobody may read any more: those whose last owner let go, and those just handed out.

    A prefix cache may rightly read a block that is free; with one, a block is spoiled when it is handed out alone.
    """

    keeps_content = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.spoiled: set[int] = set()

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        if not self.keeps_content:
            self.spoiled.update(block for block in blocks if self.refcount(block) == 0)

    def allocate(self, n: int) -> list[int]:
        blocks = super().allocate(n)
        self.spoiled.update(blocks)
        return blocks


class Poisoner:
    """Stands before a backend, and fills the spoiled blocks of a pool with NaN: whoever reads one afterwards shows.

    At the latest moment at which that is fair: a step begins with its block copies, and may copy from a block which
    that very step has taken from its last owner, or given to somebody else.
    """

    def __init__(self, backend: AttentionBackend, pool: PoisonedPool) -> None:
        self.backend = backend
        self.pool = pool

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        self.backend.copy_blocks(cache, pairs)
        spoiled = self.pool.spoiled - {copy for _, copy in pairs}
        if spoiled:
            cache.fill(float("nan"), sorted(spoiled))
        self.pool.spoiled.clear()


def shuffled_pool(num_blocks: int, block_size: int = 16, seed: int = 0) -> PoisonedPool:
    order = random.Random(seed).sample(range(num_blocks), num_blocks)
    return PoisonedPool(num_blocks, block_size, free_order=order)


def poisoned_llm(loaded: LoadedModel, *, num_blocks: int, block_size: int = 16, seed: int = 0, **settings) -> LLM:
    """An engine over a shuffled pool that is full of NaN, and that fills with NaN every block that is given back."""
    pool = shuffled_pool(num_blocks, block_size, seed)
    llm = LLM(loaded, block_pool=pool, **settings)
    runner = llm.engine.runner
    runner.backend = Poisoner(runner.backend, pool)
    pool.keeps_content = llm.engine.config.enable_prefix_caching
    runner.cache.fill(float("nan"))
    return llm


def run(engine, limit: int = 5000) -> dict:
    """Step until nobody is left, audit after every step, and return the final output of every request."""
    done = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            assert engine.pool.num_free == engine.pool.num_blocks
            return done
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
        engine.check_integrity()
    raise AssertionError(f"unfinished after {limit} steps: {engine.request_ids()}")


def assert_recorded_truly(engine) -> None:
    """Tables, refcounts, queues, progress and hashes of the last snapshot are the engine's own."""
    snapshot, scheduler, pool = engine.recorder.at(), engine.scheduler, engine.pool
    running = {request.request_id: request for request in scheduler.running}
    assert snapshot.tables == {name: request.table.blocks for name, request in running.items() if request.table.blocks}
    assert [block.refcount for block in snapshot.blocks] == [pool.refcount(b) for b in range(pool.num_blocks)]
    assert set(snapshot.queues["running"]) == set(running)
    for name, request in running.items():
        told = snapshot.requests[name]
        assert told.num_computed_tokens == request.num_computed_tokens
        assert list(told.token_ids) == request.prompt_token_ids + request.output_token_ids
    for block in snapshot.blocks:
        known = scheduler.kv.prefix_cache.hash_of(block.block)
        assert block.hash == (None if known is None else known.hex())
    assert snapshot.leaked == 0


@contextmanager
def its_own_attention(model: torch.nn.Module) -> Iterator[None]:
    """Run a model as transformers would, whatever the engine has set, and put that back afterwards."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(implementation)


def greedy(model: torch.nn.Module, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> list[int]:
    """What transformers' own `generate` makes of a prompt, one token after the other, with its own attention."""
    options = {"eos_token_id": None} if ignore_eos else {}
    with its_own_attention(model):
        ids = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return ids[0, len(prompt) :].tolist()
