"""The prefix cache under the real model: caching on and off say the same, in whatever pool and order."""

import random

import pytest
from engines import poisoned_llm, run

from labcore import SamplingParams
from labcore.models import load

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTHS = (15, 16, 17, 31, 32, 33)  # around the edges of blocks of 16
TRUNKS = (
    "You are a patient teacher. Explain every answer in plain words and with an example from the kitchen, and end with "
    "a question that makes the student think. Today's subject is heat.",
    "The following is a conversation between a traveller and the keeper of a small museum of clocks in the mountains. "
    "The keeper knows every clock by name. Traveller: Good morning.",
    "Once upon a time, in a house by the river, there lived three sisters who could not agree on anything. The eldest "
    "wanted to sell the boat, the second wanted to paint it, and the youngest",
)
TAILS = (
    " Why is the sky blue?",
    " The end came",
    " What is a clock?",
    " In the morning",
    " Tell me more about the oldest of them.",
)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def loaded(smollm2):
    return load(smollm2, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts(loaded):
    """64 prompts: beginnings of three texts at every edge, some twice, and beginnings that go on in another way."""
    dice = random.Random(3)
    trunks, tails = ([loaded.tokenizer.encode(text) for text in texts] for texts in (TRUNKS, TAILS))
    plain = [trunk[:length] for trunk in trunks for length in LENGTHS]
    nested = [dice.choice(trunks)[: dice.choice(LENGTHS)] + dice.choice(tails) for _ in range(64 - len(plain) - 6)]
    return plain + nested + dice.sample(plain, 6)


def serve(loaded, prompts, order, **settings):
    """Greedy tokens of each prompt, and the engine's counters. Prompts come in `order`, four with each step."""
    llm = poisoned_llm(loaded, **settings)
    if settings["num_blocks"] < 100:
        llm.engine.scheduler.watermark = 0  # admit whoever fits now, so that growth must push somebody out
    done = {}
    for start in range(0, len(order), 4):
        for i in order[start : start + 4]:
            llm.engine.add_request(
                f"r{i}", prompts[i], SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
            )
        done.update((output.request_id, output) for output in llm.engine.step() if output.finished)
        llm.engine.check_integrity()
    done.update(run(llm.engine))
    return [done[f"r{i}"].outputs[0].token_ids for i in range(len(prompts))], llm.engine.stats()


@pytest.fixture(scope="module")
def expected(loaded, prompts):
    tokens, stats = serve(loaded, prompts, range(64), num_blocks=256, enable_prefix_caching=False)
    assert stats["prefix_cache_hits"] == 0
    return tokens


@pytest.mark.parametrize(
    ("num_blocks", "budget", "order_seed"),
    [(256, 2048, None), (256, 2048, 1), (12, 40, None), (12, 40, 2)],
    ids=["roomy", "roomy, another order", "small pool, chunks", "small pool, chunks, another order"],
)
def test_prefix_caching_changes_no_token(loaded, prompts, expected, num_blocks, budget, order_seed):
    order = list(range(64)) if order_seed is None else random.Random(order_seed).sample(range(64), 64)
    tokens, stats = serve(
        loaded, prompts, order, num_blocks=num_blocks, max_num_batched_tokens=budget, seed=order_seed or 0
    )
    assert tokens == expected
    assert stats["prefix_cache_hits"] > 300
    assert stats["num_preemptions"] > 0 or num_blocks == 256
