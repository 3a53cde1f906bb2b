"""The real model in a pool that is far too small, with requests that come and go at any moment: nobody's words change.

Blocks of one token, so that the watermark, one block for each who runs, is used up at once and requests must step back.
"""

import random

import pytest
from engines import poisoned_llm

from labcore import LLM, SamplingParams
from labcore.models import load

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_REQUESTS, SHORTEST, LONGEST = 64, 8, 20
TEXTS = [
    "Once upon a time", "The capital of France is", "def fibonacci(n):\n", "In 1969, humans first", "Water boils at",
    "To make a good cup of tea, first", "Dear Sir or Madam,", "The quick brown fox", "1, 1, 2, 3, 5, 8,",
    "A queue is a structure in which", "Q: How many legs does a spider have?\nA:", "The three laws of robotics are",
    "It was the best of times, it was", "My favourite thing about the sea is the", "Paging was invented in",
    "She opened the door",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def crowd(loaded):
    """64 requests: (id, prompt, params). Half are greedy, half are sampled with a seed of their own."""
    dice = random.Random(6)
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    people = []
    for i in range(NUM_REQUESTS):
        how = {"temperature": 0} if i % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": i // 32}
        params = SamplingParams(max_tokens=dice.randint(SHORTEST, LONGEST), ignore_eos=True, **how)
        people.append((f"r{i}", prompts[i % len(prompts)], params))
    return people


@pytest.fixture(scope="module")
def alone(loaded, crowd):
    """What each says when it is alone in an engine with plenty of room; those who differ in length only share a run."""
    llm, said = LLM(loaded, num_blocks=64, enable_prefix_caching=False), {}
    for _, prompt, params in crowd:
        key = solo_key(prompt, params)
        if key not in said:
            longest = SamplingParams(
                max_tokens=LONGEST,
                ignore_eos=True,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
            )
            said[key] = llm.generate(prompt, longest)[0].outputs[0].token_ids
    return said


def solo_key(prompt, params):
    return (tuple(prompt), params.temperature, params.seed)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_of_64_requests_that_come_and_go_changes_no_token(loaded, crowd, alone, policy):
    llm = poisoned_llm(
        loaded, num_blocks=64, block_size=1, seed=3, enable_prefix_caching=policy == "priority",
        scheduling_policy=policy, max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    engine, dice = llm.engine, random.Random(7)
    arriving, done, aborted = list(crowd), {}, {}
    while arriving or engine.has_unfinished_requests():
        for _ in range(dice.choice((0, 0, 1, 2, 3)) if arriving else 0):
            if arriving:
                name, prompt, params = arriving.pop(0)
                engine.add_request(name, prompt, params, priority=dice.randint(0, 2))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
        if engine.request_ids() and dice.random() < 0.06:
            name = dice.choice(engine.request_ids())
            aborted[name] = engine.abort(name).outputs[0].token_ids
        engine.check_integrity()
    assert engine.stats()["num_preemptions"] >= 30
    assert len(aborted) >= 4 and len(done) + len(aborted) == NUM_REQUESTS
    assert engine.pool.num_free == 64
    for name, prompt, params in crowd:
        expected = alone[solo_key(prompt, params)]
        if name in done:
            assert done[name] == expected[: params.max_tokens], name
        else:
            assert aborted[name] == expected[: len(aborted[name])], name
