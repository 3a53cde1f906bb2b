"""The prefix cache: it finds what was computed, never what was not, and never another text's."""

import random
import subprocess
import sys

import pytest
import torch
from engines import greedy, its_own_attention, poisoned_llm, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_models import tiny

from labcore import LLM, SamplingParams
from labcore.engine.invariants import check_integrity
from labcore.kvcache.blocks import BlockPool
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import HashedPrefixCache, block_key
from labcore.models import from_model
from labcore.request import Request
from labcore.sampling_params import SamplingParams as Params
from labcore.scheduler.chunking import ChunkedPrefill, WholePrompts
from labcore.scheduler.policy import FirstComeFirstServed, PriorityWithAging
from labcore.scheduler.preemption import Recompute
from labcore.scheduler.scheduler import Scheduler


def three_bits(parent, content):
    """A hash with eight values: most texts collide."""
    return bytes([block_key(parent, content)[0] & 7])


class Bench:
    """A scheduler over a memory that remembers, for every slot, the whole text that its KV was computed from."""

    def __init__(self, *, num_blocks=16, block_size=4, max_num_seqs=8, budget=64, key_of=block_key, policy=None, chunked=True,
                 watermark=0):
        self.cache = HashedPrefixCache(block_size, key_of)
        self.scheduler = Scheduler(
            KVCacheManager(BlockPool(num_blocks, block_size), self.cache),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            chunking=ChunkedPrefill() if chunked else WholePrompts(max_num_seqs),
            preemption=Recompute(),
            policy=policy or FirstComeFirstServed(),
            watermark=watermark,
        )
        self.memory = {}
        self.requests = {}
        self.finished = {}
        self.arrivals = 0
        self.num_computed = 0

    def add(self, prompt, output=1, n=1, priority=0, salt="", cached=True, name=None):
        name = name or f"r{self.arrivals}"
        family = [
            Request(f"{name}.{k}" if n > 1 else name, list(prompt), Params(max_tokens=output), self.arrivals + k, output,
                    seed=k, priority=priority, cache_salt=salt, use_prefix_cache=cached)
            for k in range(n)
        ]
        self.arrivals += n
        self.requests.update((request.request_id, request) for request in family)
        self.scheduler.add(family[0], family[1:])
        return family[0]

    def step(self):
        plan = self.scheduler.schedule()
        size = self.scheduler.kv.pool.block_size
        moved = {d * size + i: self.memory.get(s * size + i) for s, d in plan.block_copies for i in range(size)}
        self.memory.update(moved)
        batch = [(self.requests[name], n) for name, n in plan.num_scheduled_tokens.items()]
        for request, n in batch:
            done, text = request.num_computed_tokens, tuple(request.token_ids(0, request.num_tokens))
            slots = request.table.slot_mapping()
            mark = request.cache_salt
            for p in range(done):
                assert self.memory[slots[p]] == (mark, text[: p + 1]), f"{request.request_id} reads foreign KV at {p}"
            for p in range(done, done + n):
                self.memory[slots[p]] = (mark, text[: p + 1])
            self.num_computed += n
        caught_up = [request for request, n in batch if n == request.num_uncomputed_tokens]
        caught_up += [self.requests[name] for family in plan.siblings.values() for name in family]
        for request, n in batch:
            self.scheduler.commit(request, n)
        for request in caught_up:
            request.output_token_ids.append((len(request.output_token_ids) + request.seed) % 3)
            if len(request.output_token_ids) == request.max_tokens:
                self.end(request.request_id)
        self.audit()
        return plan

    def end(self, name):
        request = self.requests.pop(name)
        self.scheduler.finish(request)
        self.finished[name] = request

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                return self
            self.step()
        raise AssertionError(f"unfinished after {limit} steps")

    def look_up(self, request, num_blocks):
        """The cached blocks of the request's first full blocks, looked up from scratch."""
        chain = []
        for key, content in self.cache._block_hashes(request, num_blocks):
            chain.append(self.cache._find(key, content, chain[-1] if chain else None))
            if chain[-1] is None:
                return chain[:-1]
        return chain

    def audit(self):
        check_integrity(self.scheduler, self.requests.values())
        size = self.scheduler.kv.pool.block_size
        for block, cached in self.cache._by_block.items():
            assert block in cached.blocks and self.cache._by_key[cached.key] is cached
            assert all(block * size + i in self.memory for i in range(size)), "a block is findable and was never computed"
        for request in self.scheduler.running:
            if request.use_prefix_cache and self.cache.key_of is block_key:
                full = request.num_computed_tokens // size
                found = zip(self.look_up(request, full), request.table.blocks, strict=False)
                assert sum(block in cached.blocks for cached, block in found) == full, "a computed block can't be found"
        if self.scheduler.waiting:
            head = self.scheduler.waiting.peek()
            found = self.look_up(head, (head.num_tokens - 1) // size if head.use_prefix_cache else 0)
            assert self.cache.match(head) == [cached.block for cached in found]
            assert not head.use_prefix_cache or head.cached_chain == found


def test_hit_of_an_equal_prompt_leaves_one_block_to_compute():
    """A full hit still computes one token, and so, in whole blocks, the last one."""
    bench = Bench()
    prompt = list(range(12))
    bench.add(prompt)
    bench.run()
    assert bench.num_computed == 12
    again = bench.add(prompt)
    plan = bench.step()
    assert plan.num_scheduled_tokens == {"r1": 4} and again.num_cached_tokens == 8
    assert (bench.scheduler.kv.prefix_cache_queries, bench.scheduler.kv.prefix_cache_hits) == (24, 8)


@pytest.mark.parametrize("length, cached", [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (13, 12)])
def test_hits_come_in_whole_blocks_and_leave_at_least_one_token(length, cached):
    bench = Bench()
    bench.add(range(length))
    bench.run()
    assert bench.add(range(length)).num_cached_tokens == 0
    bench.step()
    assert bench.finished["r1"].num_cached_tokens == cached


def test_hit_only_on_a_block_that_is_computed():
    """Two equal prompts in one step: neither may read what the other is about to write."""
    bench = Bench()
    bench.add(range(12))
    bench.add(range(12))
    assert bench.step().num_scheduled_tokens == {"r0": 12, "r1": 12}
    bench = Bench(budget=6)
    bench.add(range(12), output=2)
    bench.step()
    bench.add(range(12))
    bench.step()
    bench.step()
    assert bench.run().finished["r1"].num_cached_tokens == 8


def test_block_hash_covers_the_text_before_the_block():
    bench = Bench()
    bench.add([1, 1, 1, 1, 7, 7, 7, 7, 0])
    bench.run()
    bench.add([2, 2, 2, 2, 7, 7, 7, 7, 0])
    bench.run()
    assert bench.finished["r1"].num_cached_tokens == 0


@pytest.mark.parametrize("a, b", [
    ([65] * 4, [321] * 4), ([1] * 4, [65537] * 4), ([0] * 4, [2**31] * 4), ([256] * 4, [1] * 4), ([0] * 4, [1, 0, 0, 0]),
    ([1, 23, 4, 5], [12, 3, 4, 5]), ([1, 0, 0, 0], [0, 1, 0, 0]), ([0, 0, 0, 1], [0, 0, 1, 0]),
])
def test_block_hash_covers_token_ids_in_full_and_in_their_place(a, b):
    """Case: ids cut to eight bits made 65 and 321 one and the same; ids joined as text, [1, 23] and [12, 3]."""
    bench = Bench()
    bench.add([*a, 0])
    bench.run()
    bench.add([*b, 0])
    assert bench.run().finished["r1"].num_cached_tokens == 0


def test_block_hash_of_a_first_block_differs_from_the_same_block_behind_any_other():
    content = bytes(16)
    keys = {block_key(parent, content) for parent in (b"", bytes(16), block_key(b"", content), b"\xff" * 16)}
    assert len(keys) == 4 and all(len(key) == 16 for key in keys)


def test_hit_on_generated_tokens_by_the_next_turn_of_a_conversation():
    bench = Bench()
    first = bench.add(range(6), output=7)
    bench.run()
    bench.add([*range(6), *first.output_token_ids, 50, 51])
    bench.run()
    assert bench.finished["r1"].num_cached_tokens == 12


def test_cache_salts_keep_tenants_apart_and_opting_out_registers_nothing():
    bench = Bench(num_blocks=64)
    bench.add(range(9), salt="blue")
    bench.run()
    bench.add(range(9), salt="red")
    bench.add(range(9), salt="blue")
    bench.add(range(9), cached=False)
    bench.run()
    assert [bench.finished[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 0, 8, 0]
    bench = Bench()
    bench.add(range(9), cached=False)
    bench.run()
    assert len(bench.cache) == 0


def test_eviction_of_a_recycled_block_ends_its_hits():
    bench = Bench(num_blocks=4)
    bench.add(range(9))
    bench.run()
    bench.add(range(100, 115))
    bench.run()
    bench.add(range(9))
    assert bench.run().finished["r2"].num_cached_tokens == 0


def test_eviction_takes_the_least_recently_used_first_and_tails_before_heads():
    bench = Bench(num_blocks=8)
    bench.add(range(16), name="old")
    bench.run()
    bench.add(range(100, 116), name="young")
    bench.run()
    bench.add(range(5), name="old again")  # touches the head of the older text, and moves it to the young end
    bench.run()
    bench.add(range(200, 212), name="newcomer")
    bench.run()
    bench.add(range(16), name="old head")
    bench.run()
    assert bench.finished["old head"].num_cached_tokens == 4
    assert bench.scheduler.kv.pool.num_free == 8


@pytest.mark.parametrize("budget", [64, 4])
def test_eviction_takes_the_end_of_a_text_and_never_its_head(budget):
    """Case: all blocks of a finished request had one age, and now and then its head went first."""
    for i in range(200):
        bench = Bench(num_blocks=3, budget=budget)
        text = [5 * i + token for token in range(12)]
        for prompt, found in ((text, 0), ([7, 7, 7, 7 + i], 0), (text, 8)):
            request = bench.add(prompt)
            bench.run()
            assert request.num_cached_tokens == found


def test_eviction_of_a_block_leaves_an_equal_one_findable_and_all_that_was_computed_behind_it():
    """Two requests computed the same text side by side. Only the first one's blocks were registered, and those went."""
    bench = Bench(num_blocks=8)
    bench.add(range(12), name="first")
    second = bench.add(range(12), output=8, name="second")
    bench.step()
    bench.step()
    bench.add(range(100, 116), name="newcomer")  # takes the last free block that never held anything, and the first's three
    while second.num_computed_tokens < 16:
        bench.step()
    bench.add([*range(12), *second.output_token_ids, 99], name="third")
    assert bench.run().finished["third"].num_cached_tokens == 16


@pytest.mark.parametrize("evicted", [0, 1, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_eviction_while_a_request_waits_ends_its_match_there_or_turns_to_an_equal_block(evicted, copies):
    """The match of the waiting head is not begun anew in every step; it must not name a block that was handed out."""
    bench = Bench(num_blocks=16)
    owners = [bench.add(range(13), output=2) for _ in range(copies)]
    bench.step()
    waiting = Request("waiting", list(range(13)), Params(), 99, 1, seed=0)
    before = bench.cache.match(waiting)
    assert before == owners[-1].table.blocks[:3]
    bench.run()
    bench.cache.evict([before[evicted]])
    after = bench.cache.match(waiting)
    assert before[evicted] not in after and len(after) == (3 if copies == 2 else evicted)
    assert [cached.block for cached in waiting.cached_chain] == after
    again = bench.add(range(13), name="again")
    bench.run()
    assert len(bench.cache.match(waiting)) == 3 and again.num_cached_tokens == 4 * len(after)


def test_match_of_a_waiting_request_looks_up_each_block_once_however_long_it_waits():
    bench = Bench(num_blocks=40, block_size=4)
    bench.audit = lambda: None  # it looks blocks up, too
    bench.add(range(100), name="owner")
    bench.run()
    looked_up = []
    find = bench.cache._find
    bench.cache._find = lambda *args, **kwargs: looked_up.append(args) or find(*args, **kwargs)
    bench.add(range(1000, 1040), output=20, name="running")
    bench.step()
    bench.add([*range(100), *range(2000, 2020)], name="waits")  # finds 25 blocks that are free, and with it needs 30 of 30
    looked_up.clear()
    for _ in range(10):
        assert "waits" not in bench.step().num_scheduled_tokens
    assert 25 <= len(looked_up) <= 25 + 10 + 5  # each once, one more in every step, and those that the other publishes
    assert bench.run().finished["waits"].num_cached_tokens > 0


def test_admission_counts_idle_cached_blocks_as_free_and_once():
    """A pool of 6: the hit of 4 idle blocks leaves 2 free, the prompt needs 2 more. It must be let in, and just so."""
    bench = Bench(num_blocks=6)
    bench.add(range(17))
    bench.run()
    assert bench.scheduler.kv.pool.num_free == 6
    bench.add([*range(17), *range(90, 96)], output=2)
    plan = bench.step()
    assert plan.num_scheduled_tokens == {"r1": 7} and bench.scheduler.kv.pool.num_free == 0


def test_hits_of_a_preempted_request_are_not_counted_again():
    bench = Bench(num_blocks=64)
    request = bench.add(range(12), output=8)
    bench.step()
    bench.scheduler.roll_back([request])
    plan = bench.step()
    assert plan.num_scheduled_tokens == {"r0": 1} or plan.num_scheduled_tokens == {"r0": 5}
    assert request.num_cached_tokens == 0 and bench.scheduler.kv.prefix_cache_hits == 0
    bench.run()


def test_block_hashes_are_the_same_in_every_process():
    code = "from labcore.kvcache.prefix import block_key; print(block_key(b'', b'abcd').hex())"
    here = block_key(b"", b"abcd").hex()
    for seed in ("0", "1", "random"):
        out = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert out.stdout.strip() == here


def test_hash_collision_is_detected_and_costs_a_hit_at_most():
    bench = Bench(num_blocks=64, key_of=three_bits)
    rng = random.Random(0)
    prompts = [[rng.randrange(50) for _ in range(9)] for _ in range(60)]
    for prompt in prompts:
        bench.add(prompt)
        bench.run()  # the memory's own check would raise on foreign KV
    assert len(bench.cache) <= 8


def test_hash_collision_of_equal_tokens_behind_another_text_is_no_hit():
    """First blocks A and B whose children hold the same tokens and get the same 3-bit key."""
    child = [7, 7, 7, 7]
    cache = HashedPrefixCache(4, three_bits)

    def keys(first):
        request = Request("r", [*first, *child, 0], Params(), 0, 1, 0)
        return [key for key, _ in cache._block_hashes(request, 2)]

    heads = [[i, 1, 2, 3] for i in range(200)]
    first = heads[0]
    other = next(h for h in heads[1:] if keys(h)[1] == keys(first)[1] and keys(h)[0] != keys(first)[0])
    bench = Bench(num_blocks=64, key_of=three_bits)
    bench.add([*first, *child, 0])
    bench.run()
    bench.add([*other, 0])  # publishes the other head, so that the look-up gets as far as the child
    bench.run()
    bench.add([*other, *child, 0])
    assert bench.run().finished["r2"].num_cached_tokens == 4


class PrefixMachine(RuleBasedStateMachine):
    """Texts over three letters that share prefixes at every turn: hits, forks, chunks, preemptions, aborts, collisions."""

    @initialize(
        num_blocks=st.integers(10, 18),
        budget=st.integers(1, 30),
        max_num_seqs=st.integers(1, 6),
        collide=st.booleans(),
        policy=st.sampled_from([FirstComeFirstServed(), PriorityWithAging(4)]),
        chunked=st.booleans(),
        watermark=st.integers(0, 1),
    )
    def start(self, num_blocks, budget, max_num_seqs, collide, policy, chunked, watermark):
        self.bench = Bench(num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs, policy=policy, chunked=chunked,
                           key_of=three_bits if collide else block_key, watermark=watermark)

    @rule(
        prompt=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=18),
        output=st.integers(1, 12),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        cached=st.sampled_from([True, True, True, False]),
    )
    def arrive(self, prompt, output, n, priority, salt, cached):
        self.bench.add(prompt, output, n, priority, salt, cached)

    @precondition(lambda self: self.bench.requests)
    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            if self.bench.requests:
                self.bench.step()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.bench.requests)))
        family = [other for other in self.bench.requests if other.split(".")[0] == name.split(".")[0]]
        for member in family:
            self.bench.end(member)

    @precondition(lambda self: self.bench.scheduler.running)
    @rule()
    def break_off(self):
        plan = self.bench.scheduler.schedule()
        self.bench.scheduler.roll_back([self.bench.requests[name] for name in plan.num_scheduled_tokens])

    @invariant()
    def nothing_uncomputed_can_be_found_and_every_block_has_its_owners(self):
        if hasattr(self, "bench"):
            self.bench.audit()

    def teardown(self):
        if hasattr(self, "bench"):
            self.bench.run()
            assert self.bench.scheduler.kv.pool.num_free == self.bench.scheduler.kv.pool.num_blocks


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixMachine = PrefixMachine.TestCase


@pytest.mark.slow
def test_prefix_cache_serves_nothing_foreign_in_thirty_thousand_steps():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(PrefixMachine, settings=settings(
        max_examples=600, stateful_step_count=50, deadline=None, derandomize=True))


def test_preemption_doesnt_count_blocks_that_the_urgent_request_has_found_as_coming_free():
    """A victim's blocks that the urgent one shares stay taken when the victim goes: counted as free, it goes in vain."""
    bench = Bench(num_blocks=7, policy=PriorityWithAging(1000))
    bench.add([9] * 8 + [1], output=3, priority=1, name="peer")
    bench.add([0] * 13, output=3, priority=5, name="victim")
    bench.step()  # 3 and 4 blocks, none is free
    bench.add([0] * 12 + [3] * 8, output=2, priority=1, name="urgent")  # finds 3 of the victim's, lacks 2
    assert bench.step().preempted == [], "the victim can give one block, and goes in vain"
    bench.run()


def test_preemption_counts_blocks_that_only_victims_share_as_coming_free():
    """Four continuations share a long prompt. To push all of them out gives every block of theirs back."""
    bench = Bench(num_blocks=12, policy=PriorityWithAging(1000))
    bench.add([0] * 25, output=12, n=4, priority=5, name="low")
    bench.step()
    bench.step()
    bench.add([1] * 25, output=2, priority=0, name="urgent")
    plan = bench.step()
    assert "urgent" in plan.num_scheduled_tokens
    bench.run()


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def nested_prompts(num, seed):
    """Prompts that share and nest prefixes, of the lengths around a block's edge."""
    rng = random.Random(seed)
    trunk = [rng.randrange(1, 200) for _ in range(40)]
    lengths = [15, 16, 17, 31, 32, 33]
    return [
        trunk[: lengths[i % 6]] if i % 3 else trunk[: rng.randrange(1, 34)] + [rng.randrange(1, 200) for _ in range(6)]
        for i in range(num)
    ]


@pytest.mark.parametrize("num_blocks", [96, 12])
@pytest.mark.parametrize("budget", [2048, 24])
def test_prefix_caching_changes_no_token_whatever_the_pool_the_budget_and_the_order(model, num_blocks, budget):
    loaded, asked = from_model(model), nested_prompts(24, seed=num_blocks)
    expected = [greedy(model, prompt, 10) for prompt in asked]
    for order_seed in (0, 1):
        order = random.Random(order_seed).sample(range(len(asked)), len(asked))
        llm = poisoned_llm(loaded, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=budget, seed=order_seed)
        for i in order:
            llm.engine.add_request(f"r{i}", asked[i], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        done = run(llm.engine)
        assert [done[f"r{i}"].outputs[0].token_ids for i in range(len(asked))] == expected
        assert llm.engine.stats()["prefix_cache_hits"] > 0


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("budget", [2048, 24])
def test_logprobs_are_complete_and_the_same_whether_or_not_the_prompt_was_found(model, length, budget):
    """Case: log-probabilities were missing, or shifted, as soon as a whole block of the prompt came from the cache."""
    llm = poisoned_llm(from_model(model), num_blocks=32, block_size=16, max_num_batched_tokens=budget)
    asked = nested_prompts(4, seed=length)[1][:1] + list(range(1, length))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    first, second = (llm.generate(asked, params)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // 16 * 16)
    whole = [*asked, *first.outputs[0].token_ids]
    with its_own_attention(model):
        plain = model(torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
    for output in (first.outputs[0], second.outputs[0]):
        assert output.token_ids == first.outputs[0].token_ids and len(output.logprobs) == 4
        for i, logprobs in enumerate(output.logprobs):
            assert len(logprobs) == 3 and output.token_ids[i] in logprobs
            expected = {token: plain[length - 1 + i, token].item() for token in logprobs}
            assert logprobs == pytest.approx(expected, abs=1e-4)
    llm.engine.check_integrity()


def test_logprobs_do_not_depend_on_the_order_in_which_prompts_with_a_common_beginning_come(model):
    trunk = [1 + i % 90 for i in range(32)]
    asked = {name: [*trunk, *range(100, 100 + more)] for name, more in (("a", 8), ("b", 16), ("c", 18))}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    shared = poisoned_llm(from_model(model), num_blocks=32, block_size=16)
    seen = {name: [] for name in asked}
    for order in ("abc", "cba", "bac"):
        for llm in (poisoned_llm(from_model(model), num_blocks=32, block_size=16), shared):
            for name, output in zip(order, llm.generate([asked[name] for name in order], params), strict=True):
                seen[name].append(output.outputs[0])
            llm.engine.check_integrity()
    assert shared.engine.stats()["prefix_cache_hits"] >= 32 * 6
    for first, *others in seen.values():
        for other in others:
            assert other.token_ids == first.token_ids
            for ours, theirs in zip(other.logprobs, first.logprobs, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)


def test_prefix_cache_that_is_empty_is_plugged_in_and_not_taken_for_none(model):
    cache = HashedPrefixCache(8)
    llm = LLM(from_model(model), num_blocks=32, block_size=8, prefix_cache=cache)
    llm.generate(list(range(1, 20)), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert llm.engine.scheduler.kv.prefix_cache is cache and len(cache) == 2


def test_hit_of_the_next_chat_turn_on_blocks_that_were_filled_while_it_was_answered(model):
    """Prompt of 6, answer of 13: of its 19 tokens the last has no KV yet, so 4 blocks of 4 are found, three of them answer."""
    llm = LLM(from_model(model), num_blocks=32, block_size=4)
    first, news = list(range(1, 7)), [7, 8, 9]
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    said = llm.generate(first, params)[0].outputs[0].token_ids
    second = [*first, *said, *news]
    again = llm.generate(second, params)[0]
    assert again.num_cached_tokens == 16
    assert again.outputs[0].token_ids == greedy(model, second, 13)
