"""The KV cache manager: what it allocates is evicted, what it shares is counted, what it frees stays findable."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from labcore.kvcache.blocks import BlockPool, OutOfBlocks
from labcore.kvcache.manager import KVCacheManager
from labcore.kvcache.prefix import HashedPrefixCache, NoPrefixCache, block_key
from labcore.request import Request
from labcore.sampling_params import SamplingParams

SIZE = 4


def manager(num_blocks: int = 8, order: list[int] | None = None) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks, SIZE, free_order=order), HashedPrefixCache(SIZE))


def admitted(kv: KVCacheManager, tokens: list[int], name: str = "r") -> Request:
    """A request that is admitted, reserved and committed whole."""
    request = Request(name, list(tokens), SamplingParams(max_tokens=8), arrival=0, max_tokens=8, seed=0)
    kv.open_table(request)
    kv.attach(request, kv.match(request))
    n = request.num_uncomputed_tokens
    kv.reserve(request, n)
    kv.commit(request, n)
    return request


def found(kv: KVCacheManager, tokens: list[int]) -> list[int]:
    return kv.match(Request("asks", list(tokens), SamplingParams(), arrival=0, max_tokens=1, seed=0))


def test_manager_frees_blocks_that_stay_findable_and_evicts_them_when_they_are_reserved_again():
    kv = manager(num_blocks=4)
    first = admitted(kv, list(range(8)))
    blocks = list(first.table.blocks)
    kv.free(first)
    assert kv.pool.num_free == 4 and found(kv, [*range(8), 9]) == blocks
    second = admitted(kv, [7] * 13)  # takes all four
    assert sorted(second.table.blocks) == [0, 1, 2, 3] and found(kv, [*range(8), 9]) == []
    assert found(kv, [7] * 13) == second.table.blocks[:3]


def test_manager_evicts_the_block_that_a_copy_on_write_takes():
    kv = manager(num_blocks=3, order=[0, 1, 2])
    gone = admitted(kv, [1, 2, 3, 4])
    kv.free(gone)
    assert found(kv, [1, 2, 3, 4, 5]) == [0]
    parent, child = admitted(kv, [9, 9], "parent"), Request("child", [9, 9], SamplingParams(), 1, 8, 0)
    kv.share(child, parent)
    kv.pool.free(kv.pool.allocate(1))  # block 0, the registered one, is next
    assert next(kv.pool.free_blocks()) == 0
    assert kv.reserve(child, 1) == (parent.table.blocks[0], 0)
    assert found(kv, [1, 2, 3, 4, 5]) == [] and kv.reserve(parent, 1) is None


def test_manager_evicts_what_it_allocates_for_no_request():
    kv = manager(num_blocks=2)
    kv.free(admitted(kv, [1, 2, 3, 4]))
    taken = kv.allocate(2)
    assert sorted(taken) == [0, 1] and found(kv, [1, 2, 3, 4, 5]) == []
    with pytest.raises(OutOfBlocks):
        kv.allocate(1)


def test_manager_evicts_on_demand_and_leaves_the_blocks_with_their_owners():
    kv = manager()
    request = admitted(kv, list(range(8)))
    kv.evict(request.table.blocks[1:])
    assert found(kv, [*range(8), 9]) == request.table.blocks[:1]
    kv.evict()
    assert found(kv, [*range(8), 9]) == [] and kv.pool.refcount(request.table.blocks[0]) == 1


def test_manager_shares_every_block_and_the_hashes_that_are_known():
    kv = manager()
    parent = admitted(kv, list(range(10)))
    child = Request("child", list(range(10)), SamplingParams(max_tokens=8), 1, 8, 0)
    kv.share(child, parent)
    assert child.table.blocks == parent.table.blocks and child.num_computed_tokens == 10
    assert child.block_hashes == parent.block_hashes[:2] and child.block_hashes is not parent.block_hashes
    child.output_token_ids += [5, 6]
    parent.output_token_ids += [7, 8]
    for request in (child, parent):
        kv.reserve(request, 2)
        kv.commit(request, 2)
    assert found(kv, [*range(10), 5, 6, 0])[2:] == child.table.blocks[2:]
    assert found(kv, [*range(10), 7, 8, 0])[2:] == parent.table.blocks[2:]
    assert child.table.blocks[2] != parent.table.blocks[2]


def test_manager_counts_missing_blocks_without_those_that_are_in_use():
    kv = manager()
    request = admitted(kv, list(range(8)))
    asks = Request("asks", [*range(8), 1, 2], SamplingParams(), 0, 1, 0)
    assert kv.blocks_missing(asks, kv.match(asks)) == 1
    kv.free(request)  # found, but in the free queue: each counts as taken
    assert kv.blocks_missing(asks, kv.match(asks)) == 3


def test_manager_counts_a_preempted_request_once():
    kv = manager()
    kv.free(admitted(kv, list(range(8))))
    second = admitted(kv, list(range(8)), "second")
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits, second.num_cached_tokens) == (16, 4, 4)
    kv.free(second)
    second.num_preemptions, second.num_computed_tokens = 1, 0
    kv.attach(second, kv.match(second))
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits, second.num_cached_tokens) == (16, 4, 4)


def test_manager_without_a_prefix_cache_finds_and_registers_nothing():
    kv = KVCacheManager(BlockPool(4, SIZE), NoPrefixCache(SIZE))
    kv.free(admitted(kv, list(range(8))))
    assert found(kv, [*range(8), 9]) == [] and kv.pool.num_free == 4


class RaisesOnFree(BlockPool):
    """`free` raises while `broken`."""

    broken = False

    def free(self, blocks):
        if self.broken:
            raise RuntimeError("free")
        super().free(blocks)


def test_copy_on_write_whose_free_raises_leaves_both_blocks_with_the_table():
    """Case: the fresh block was in no table, and was never free again."""
    kv = KVCacheManager(RaisesOnFree(4, SIZE), NoPrefixCache(SIZE))
    parent, child = admitted(kv, [1, 2]), Request("child", [1, 2], SamplingParams(), 1, 8, 0)
    kv.share(child, parent)
    kv.pool.broken = True
    with pytest.raises(RuntimeError, match="free"):
        kv.reserve(child, 1)
    kv.pool.broken = False
    kv.free(child)
    kv.free(parent)
    assert kv.pool.num_free == 4


class ManagerMachine(RuleBasedStateMachine):
    """Admit, grow, fork, free, take and give back, against a memory that knows the text behind each slot."""

    def __init__(self):
        super().__init__()
        cache = HashedPrefixCache(SIZE, lambda parent, content: block_key(parent, content)[:1])  # collisions are common
        self.kv = KVCacheManager(BlockPool(10, SIZE, free_order=[(3 * i + 1) % 10 for i in range(10)]), cache)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.taken: list[list[int]] = []
        self.arrivals = 0

    def compute(self, request: Request) -> None:
        n = request.num_uncomputed_tokens
        copy = self.kv.reserve(request, n)
        if copy is not None:
            src, dst = copy
            for i in range(SIZE):
                self.memory[dst * SIZE + i] = self.memory.get(src * SIZE + i, ())
        text, slots = tuple(request.token_ids(0, request.num_tokens)), request.table.slot_mapping()
        done = request.num_computed_tokens
        for i in range(done):
            assert self.memory[slots[i]] == text[: i + 1], f"token {i} reads foreign KV"
        self.memory |= {slots[i]: text[: i + 1] for i in range(done, done + n)}
        self.kv.commit(request, n)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, prompt):
        request = Request(f"r{self.arrivals}", prompt, SamplingParams(max_tokens=40), self.arrivals, 40, 0)
        self.arrivals += 1
        self.kv.open_table(request)
        cached = self.kv.match(request)
        if self.kv.blocks_missing(request, cached) > self.kv.pool.num_free:
            return
        self.kv.attach(request, cached)
        self.compute(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        request = data.draw(st.sampled_from(self.requests))
        if request.table.blocks_needed(1) <= self.kv.pool.num_free:
            request.output_token_ids.append(token)
            self.compute(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.requests))
        child = parent.fork(f"r{self.arrivals}", arrival=self.arrivals)
        self.arrivals += 1
        self.kv.share(child, parent)
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.kv.free(request)

    @precondition(lambda self: self.kv.pool.num_free)
    @rule(data=st.data())
    def take(self, data):
        self.taken.append(self.kv.allocate(data.draw(st.integers(1, self.kv.pool.num_free))))
        self.memory |= {block * SIZE + i: ("gone",) for block in self.taken[-1] for i in range(SIZE)}

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self):
        self.kv.pool.free(self.taken.pop())

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def match_finds_only_what_was_computed(self, prompt):
        blocks = found(self.kv, prompt)
        for i in range(len(blocks) * SIZE):
            assert self.memory[blocks[i // SIZE] * SIZE + i % SIZE] == tuple(prompt[: i + 1])

    @invariant()
    def every_refcount_is_the_number_of_tables(self):
        owners = [0] * 10
        for blocks in [*(request.table.blocks for request in self.requests), *self.taken]:
            for block in blocks:
                owners[block] += 1
        assert owners == [self.kv.pool.refcount(block) for block in range(10)]


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
