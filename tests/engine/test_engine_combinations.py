"""Prefix hits, chunks, forks, beams, preemptions, broken steps and aborts, all at once: nobody's words change.

The model is made up (see `remembering`), so that what each request must say is known without an engine, and a read of
anybody else's KV is seen at once.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from remembering import expected_beams, expected_completion, remembering_llm
from tiny_models import tiny

from labcore import BeamSearchParams, SamplingParams
from labcore.kvcache.prefix import HashedPrefixCache, NoPrefixCache, block_key
from labcore.models import from_model

LOADED = from_model(tiny("qwen3"))

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.7, 1.5]),
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.integers(1, 14),
    seed=st.integers(0, 9),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop=st.sampled_from([None, None, "ab", ["abc", "c"]]),
    stop_token_ids=st.sampled_from([None, None, [1]]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    presence_penalty=st.sampled_from([0, 1.5]),
    frequency_penalty=st.sampled_from([0, 0.5]),
    repetition_penalty=st.sampled_from([1, 1.3]),
) | st.builds(SamplingParams, temperature=st.just(0), max_tokens=st.integers(1, 14), ignore_eos=st.booleans())
any_search = st.builds(
    BeamSearchParams, beam_width=st.integers(1, 4), max_tokens=st.integers(1, 9), ignore_eos=st.booleans()
)
any_prompt = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=18)


def key_of_three_bits(parent: bytes, content: bytes) -> bytes:
    return bytes([block_key(parent, content)[0] & 7])


CACHES = {
    "none": lambda: NoPrefixCache(4),
    "hashed": lambda: HashedPrefixCache(4),
    "colliding": lambda: HashedPrefixCache(4, key_of_three_bits),
}


class EngineMachine(RuleBasedStateMachine):
    """Arrivals of every kind, steps, steps that break off, preemptions out of nothing, aborts; in tiny pools."""

    @initialize(
        num_blocks=st.integers(6, 20),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 3, 5, 8, 13, 64]),
        cache=st.sampled_from([*CACHES, "hashed"]),
        chunked=st.booleans(),
        max_partial=st.integers(1, 3),
        threshold=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        aging=st.sampled_from([1, 4, 1000]),
        watermark=st.integers(0, 1),
        seed=st.integers(0, 2**32),
    )
    def start(self, num_blocks, max_num_seqs, budget, cache, chunked, max_partial, threshold, policy, aging, watermark, seed):
        self.engine = remembering_llm(
            LOADED, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
            prefix_cache=CACHES[cache](), enable_prefix_caching=cache != "none", enable_chunked_prefill=chunked,
            max_num_partial_prefills=max_partial, long_prefill_token_threshold=threshold, scheduling_policy=policy,
            priority_aging_steps=aging, max_model_len=40,
        ).engine  # fmt: skip
        self.engine.scheduler.watermark = watermark
        self.dice = random.Random(seed)
        self.asked, self.begun, self.said, self.done = {}, {}, {}, set()

    @rule(
        prompt=any_prompt, params=any_params | any_search, priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]), cached=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def arrive(self, prompt, params, priority, salt, cached):
        name = f"r{len(self.asked)}"
        try:
            self.engine.add_request(name, prompt, params, priority, cache_salt=salt, use_prefix_cache=cached)
        except ValueError as refused:
            assert "needs" in str(refused) or "beam_width" in str(refused)
            return
        self.asked[name] = prompt, params

    @precondition(lambda self: self.sampled())
    @rule(temperature=st.sampled_from([None, 0, 1.5]), seed=st.integers(0, 9))
    def fork(self, temperature, seed):
        """Of whoever is there: one who runs, in mid-prompt or decoding, one who waits, one of several continuations."""
        parent, name = self.dice.choice(self.sampled()), f"f{len(self.asked)}"
        self.engine.fork(parent.request_id, name, temperature=temperature, seed=seed)
        temperature = parent.params.temperature if temperature is None else temperature
        params = dataclasses.replace(parent.params, n=1, seed=seed, temperature=temperature)
        self.asked[name] = parent.prompt_token_ids, params
        self.begun[name] = list(parent.output_token_ids)
        self.said[name, 0] = self.begun[name], ""

    @precondition(lambda self: self.engine.has_unfinished_requests())
    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.engine.has_unfinished_requests())
    @rule(tokens=st.integers(0, 6))
    def break_off(self, tokens):
        """The model falls over when it has computed so many tokens of a step, if the step has so many."""
        self.engine.runner.fail_after = tokens
        try:
            self.one_step()
        except RuntimeError:
            pass
        self.engine.runner.fail_after = None

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self):
        running = self.engine.scheduler.running
        self.engine.scheduler.roll_back(self.dice.sample(running, self.dice.randint(1, len(running))))

    @precondition(lambda self: self.engine.request_ids())
    @rule()
    def abort(self):
        name = self.dice.choice(self.engine.request_ids())
        self.take(self.engine.abort(name), by_abort=True)

    @invariant()
    def every_block_and_every_request_is_where_it_belongs(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def sampled(self):
        scheduler = self.engine.scheduler
        everybody = [*scheduler.running, *scheduler.waiting_requests()]
        return [request for request in everybody if isinstance(request.params, SamplingParams)]

    def one_step(self):
        if self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.take(output)

    def take(self, output, by_abort=False):
        """One output a request and step, which goes on where the last one ended; and nothing after the last."""
        name = output.request_id
        prompt, params = self.asked[name]
        assert name not in self.done and output.prompt_token_ids == prompt
        if output.finished:
            self.done.add(name)
        for completion in output.outputs if isinstance(params, SamplingParams) else ():
            before = self.said.get((name, completion.index), ([], ""))
            assert completion.token_ids[: len(before[0])] == before[0] and completion.text.startswith(before[1])
            assert len(completion.token_ids) - len(before[0]) <= (0 if by_abort else 1)
            assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
            self.said[name, completion.index] = completion.token_ids, completion.text
        if output.finished:
            self.compare(output, prompt, params, by_abort)

    def compare(self, output, prompt, params, by_abort):
        if isinstance(params, BeamSearchParams):
            if not by_abort:
                assert [tuple(text.token_ids) for text in output.outputs] == expected_beams(prompt, params)
            return
        assert [completion.index for completion in output.outputs] == list(range(params.n))
        for completion in output.outputs:
            seed, begun = seed_of(params, completion.index), self.begun.get(output.request_id, ())
            tokens, text, reason = expected_completion(prompt, params, seed, begun)
            if completion.finish_reason == "abort":
                assert completion.token_ids == tokens[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.text, completion.finish_reason) == (tokens, text, reason)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.one_step()
            self.engine.check_integrity()
        assert self.done == set(self.asked) and not self.engine.has_unfinished_requests()
        assert self.engine.pool.num_free == self.engine.pool.num_blocks


def seed_of(params, index):
    return params.seed + index if params.seed is not None else 0


EngineMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.slow
def test_engine_tokens_are_right_through_ten_thousand_events():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(EngineMachine, settings=settings(
        max_examples=400, stateful_step_count=50, deadline=None, derandomize=True))


ENDS = {
    "length": SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    "end token": SamplingParams(temperature=1.5, seed=0, max_tokens=90, min_tokens=9),
    "stop id": SamplingParams(temperature=1.5, seed=0, max_tokens=90, ignore_eos=True, min_tokens=9, stop_token_ids=[3]),
    "stop string": SamplingParams(temperature=1.5, seed=0, max_tokens=90, ignore_eos=True, min_tokens=9, stop="da"),
    "abort": SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("end", ENDS)
def test_pool_is_whole_however_a_request_ends_and_only_computed_blocks_are_found(end, block_size):
    """Case: the slot of the last token, which has no KV, was freed by two paths, or by none."""
    engine = remembering_llm(
        LOADED, num_blocks=128 // block_size, block_size=block_size, max_num_batched_tokens=4, max_model_len=110
    ).engine
    prompt, params = [2, 0, 1, 1, 4], ENDS[end]
    engine.add_request("r", prompt, params)
    for _ in range(2 if end == "one token" else 9):
        (*_, output) = engine.step() or [None]
    if end == "abort":
        output = engine.abort("r")
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    engine.check_integrity()
    (completion,) = output.outputs
    assert completion.finish_reason == {"length": "length", "one token": "length", "abort": "abort"}.get(end, "stop")
    if end != "abort":
        assert completion.token_ids == expected_completion(prompt, params, 0)[0]
    assert sorted(engine.pool.free_blocks()) == list(range(128 // block_size))
    text = tuple(prompt + completion.token_ids)
    findable = [block for block in range(128 // block_size) if engine.scheduler.kv.prefix_cache.hash_of(block) is not None]
    held = sorted(engine.runner.memory[block * block_size + block_size - 1] for block in findable)
    assert held == [("", text[:n]) for n in range(block_size, len(text), block_size)]
