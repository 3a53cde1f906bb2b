"""Every family speaks from paged memory exactly as transformers' own `generate` lets it speak."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tiny_models import KINDS, prompt, reference_greedy, tiny

from labcore import LLM, SamplingParams
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.tensors import KVCache
from labcore.models import from_model

PROMPT_LENGTHS = (1, 2, 3, 7, 8, 9, 17, 40, 23)  # around the window of 8, and up to five times as long
OUTPUT_LENGTHS = (20, 1, 12, 9, 16, 5, 24, 10, 15)


class PoisonedPool(BlockPool):
    """A pool that hands out its blocks in shuffled order and fills each with NaN while nobody owns it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        order = random.Random(block_size).sample(range(num_blocks), num_blocks)
        super().__init__(num_blocks, block_size, free_order=order)
        self.cache: KVCache | None = None

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        if unowned := [block for block in blocks if self.refcount(block) == 0]:
            self.cache.fill(float("nan"), unowned)


def speak_from_pages(
    kind: str, prompts: list[list[int]], lengths: Sequence[int], preempts: bool = False, **settings: int
) -> list[list[int]]:
    """Greedy tokens of a tiny model in one engine, whose integrity is checked after each step."""
    pool = PoisonedPool(settings.pop("num_blocks"), settings.pop("block_size"))
    engine = LLM(from_model(tiny(kind)), block_pool=pool, enable_prefix_caching=False, **settings).engine
    pool.cache = engine.runner.cache
    pool.cache.fill(float("nan"))
    for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add_request(str(i), ids, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        engine.check_integrity()
    assert pool.num_free == pool.num_blocks
    assert (engine.stats()["num_preemptions"] > 0) == preempts
    return [done[str(i)] for i in range(len(prompts))]


def expected(kind: str, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` says to each prompt by itself."""
    model = tiny(kind)
    return [reference_greedy(model, ids, n) for ids, n in zip(prompts, OUTPUT_LENGTHS, strict=True)]


@pytest.fixture
def prompts() -> list[list[int]]:
    return [prompt(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_equals_generate(kind: str, prompts: list[list[int]]) -> None:
    wanted = expected(kind, prompts)
    assert len({tuple(tokens[:1]) for tokens in wanted}) > 1, "a model that always says the same proves nothing"
    assert speak_from_pages(kind, prompts, OUTPUT_LENGTHS, block_size=4, num_blocks=128) == wanted


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_block_size_changes_no_token(kind: str, block_size: int, prompts: list[list[int]]) -> None:
    spoken = speak_from_pages(kind, prompts, OUTPUT_LENGTHS, block_size=block_size, num_blocks=400)
    assert spoken == expected(kind, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_preemption_change_no_token(kind: str, prompts: list[list[int]]) -> None:
    spoken = speak_from_pages(
        kind, prompts, OUTPUT_LENGTHS, preempts=True, block_size=4, num_blocks=20, max_num_batched_tokens=11
    )
    assert spoken == expected(kind, prompts)
