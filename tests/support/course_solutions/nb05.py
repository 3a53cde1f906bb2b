"""Right and wrong answers to the exercises of notebook 05: what the checks must accept and must refuse."""

from __future__ import annotations

from itertools import accumulate

from labcore.course.exercises.nb05 import MendedLazyPrefixCache, blocks_found, branch, chain_keys
from labcore.course.exercises.nb05_planted import LazyPrefixCache
from labcore.kvcache.prefix import HashedPrefixCache


def chain_by_accumulate(tokens, block_size, key_of):
    blocks = [tuple(tokens[i * block_size : (i + 1) * block_size]) for i in range(len(tokens) // block_size)]
    return list(accumulate(blocks, key_of, initial=b""))[1:]


def chain_with_the_rest(tokens, block_size, key_of):
    keys = [b""]
    for i in range(0, len(tokens), block_size):
        keys.append(key_of(keys[-1], tuple(tokens[i : i + block_size])))
    return keys[1:]


def chain_without_parents(tokens, block_size, key_of):
    return [key_of(b"", tuple(tokens[i * block_size : (i + 1) * block_size])) for i in range(len(tokens) // block_size)]


def chain_of_two(tokens, block_size, key_of):
    """Each key knows the block before it, and nothing before that."""
    alone = chain_without_parents(tokens, block_size, key_of)
    blocks = [tuple(tokens[i * block_size : (i + 1) * block_size]) for i in range(len(tokens) // block_size)]
    return [key_of(parent, block) for parent, block in zip([b"", *alone], blocks, strict=False)]


def chain_that_begins_with_none(tokens, block_size, key_of):
    parent, keys = None, []
    for i in range(len(tokens) // block_size):
        parent = key_of(parent, tuple(tokens[i * block_size : (i + 1) * block_size]))
        keys.append(parent)
    return keys


class WalksByNumber(HashedPrefixCache):
    def match(self, request):
        chain, request.cached_chain = [], []
        most = (request.num_tokens - 1) // self.block_size if request.use_prefix_cache else 0
        while len(chain) < most:
            key, content = self._block_hashes(request, most)[len(chain)]
            candidate = self._by_key.get(key)
            parent = chain[-1] if chain else None
            if not candidate or (candidate.content, candidate.parent) != (content, parent):
                break
            chain.append(candidate)
        request.cached_chain = chain
        return [cached.block for cached in chain]


class FindsAll(HashedPrefixCache):
    """A full hit leaves nothing to compute."""

    def match(self, request):
        request.cached_chain = []
        for key, content in self._block_hashes(request, request.num_tokens // self.block_size):
            found = self._by_key.get(key)
            parent = request.cached_chain[-1] if request.cached_chain else None
            if not request.use_prefix_cache or found is None or found.content != content or found.parent is not parent:
                break
            request.cached_chain.append(found)
        return [cached.block for cached in request.cached_chain]


class TrustsTheKey(HashedPrefixCache):
    def match(self, request):
        request.cached_chain = []
        for key, _ in self._block_hashes(request, (request.num_tokens - 1) // self.block_size):
            if key not in self._by_key or not request.use_prefix_cache:
                break
            request.cached_chain.append(self._by_key[key])
        return [cached.block for cached in request.cached_chain]


class IgnoresTheParent(HashedPrefixCache):
    def match(self, request):
        request.cached_chain = []
        for key, content in self._block_hashes(request, (request.num_tokens - 1) // self.block_size):
            found = self._by_key.get(key)
            if found is None or found.content != content or not request.use_prefix_cache:
                break
            request.cached_chain.append(found)
        return [cached.block for cached in request.cached_chain]


class AddsToTheChain(HashedPrefixCache):
    def match(self, request):
        before = list(request.cached_chain)
        found = super().match(request)
        request.cached_chain = before + request.cached_chain
        return found


class ServesThoseWhoOptOut(HashedPrefixCache):
    def match(self, request):
        wish, request.use_prefix_cache = request.use_prefix_cache, True
        found = super().match(request)
        request.use_prefix_cache = wish
        return found


class LeavesTheCachesOwnList(HashedPrefixCache):
    """The request adds to the chain what it publishes, and the blocks that go with it are missing."""

    def match(self, request):
        found = super().match(request)
        request.cached_chain = self._last_chain
        return found


class AnswersAsBefore(HashedPrefixCache):
    def match(self, request):
        if request is not self._last_request:
            self.answer = super().match(request)
        return self.answer


class GivesCachedBlocks(HashedPrefixCache):
    def match(self, request):
        super().match(request)
        return list(request.cached_chain)


def found_by_list(trace, capacity):
    kept, found = [], 0
    for request in trace:
        hits = 0
        while hits < len(request) and request[hits] in kept:
            hits += 1
        found += hits
        kept = list(request) + [block for block in kept if block not in request]
        kept = kept[:capacity]
    return found


def found_first_in_first_out(trace, capacity):
    kept, found = [], 0
    for request in trace:
        hits = 0
        while hits < len(request) and request[hits] in kept:
            hits += 1
        found += hits
        kept += [block for block in reversed(request) if block not in kept]
        kept = kept[max(0, len(kept) - capacity) :]
    return found


def found_heads_first(trace, capacity):
    kept, found = [], 0
    for request in trace:
        hits = 0
        while hits < len(request) and request[hits] in kept:
            hits += 1
        found += hits
        kept = [block for block in kept if block not in request] + list(request)
        kept = kept[max(0, len(kept) - capacity) :]
    return found


def found_and_kept_for_ever(trace, capacity):
    return blocks_found(trace, 10**9)


def found_after_keeping(trace, capacity):
    kept, found = [], 0
    for request in trace:
        kept = (list(request) + [block for block in kept if block not in request])[:capacity]
        found += sum(block in kept for block in request)
    return found


def found_with_one_room_less(trace, capacity):
    return blocks_found(trace, capacity - 1)


def branch_by_forking_all(beams, parents):
    children = [beams[parent].fork() for parent in parents]
    for beam in beams:
        beam.free()
    copies = []
    for child in children:
        copy = child.copy_on_write()
        if copy:
            copies.append(copy)
        child.append(1)
    return children, copies


def branch_without_freeing(beams, parents):
    tables, copies = branch_children(beams, parents)
    return tables, copies


def branch_children(beams, parents):
    """Every child is a fork, and the old tables keep their blocks."""
    tables = [beams[parent].fork() for parent in parents]
    copies = [copy for copy in (table.copy_on_write() for table in tables) if copy]
    for table in tables:
        table.append(1)
    return tables, copies


def branch_one_by_one(beams, parents):
    """The second child is forked from a table that has its sibling's token."""
    tables, copies = [], []
    for beam, table in enumerate(beams):
        if beam not in parents:
            table.free()
    for place, parent in enumerate(parents):
        table = beams[parent] if parent not in parents[:place] else beams[parent].fork()
        copy = table.copy_on_write()
        copies += [copy] if copy else []
        table.append(1)
        tables.append(table)
    return tables, copies


def branch_that_hides_its_copies(beams, parents):
    return branch(beams, parents)[0], []


def branch_with_copies_backwards(beams, parents):
    tables, copies = branch(beams, parents)
    return tables, [copy[::-1] for copy in copies]


def branch_that_copies_for_all(beams, parents):
    """Copies also for the one that could have kept the block."""
    pool = beams[0].pool
    children = [beams[parent].fork() for parent in parents]
    copies = [copy for copy in (child.copy_on_write() for child in children) if copy]
    for child in children:
        child.append(1)
    for beam in beams:
        beam.free()
    assert pool.num_free >= 0
    return children, copies


class ForgetsBoth(LazyPrefixCache):
    def evict(self, blocks):
        for block in blocks:
            key = self.holds.pop(block, None)
            if self.where.get(key) == block:
                del self.where[key]


class AlwaysOverwrites(LazyPrefixCache):
    """Mends the second way in, and leaves the first open: a block that is not full yet."""

    def cache_full_blocks(self, request):
        keys = self.keys(request, request.num_computed_tokens // self.block_size)
        for block, key in zip(request.table.blocks, keys, strict=False):
            self.where[key], self.holds[block] = block, key


class FindsNothing(LazyPrefixCache):
    def match(self, request):
        return []


class ForgetsTheFirst(LazyPrefixCache):
    def evict(self, blocks):
        for block in blocks[:1]:
            self.holds.pop(block, None)


class ForgetsWhere(LazyPrefixCache):
    """Drops the block's number as if it were a key: nothing is ever dropped."""

    def evict(self, blocks):
        for block in blocks:
            self.where.pop(block, None)


RIGHT = {
    "05.chain": [chain_keys, chain_by_accumulate],
    "05.match": [HashedPrefixCache, WalksByNumber],
    "05.eviction": [blocks_found, found_by_list],
    "05.branch": [branch, branch_by_forking_all],
    "05.recycled": [MendedLazyPrefixCache, ForgetsBoth],
}

WRONG = {
    "05.chain": [
        (chain_with_the_rest, "fills no block"),
        (chain_without_parents, "the second key"),
        (chain_of_two, "the third key"),
        (chain_that_begins_with_none, "the first key"),
    ],
    "05.match": [
        (FindsAll, "one token has to be left"),
        (TrustsTheKey, "other tokens"),
        (IgnoresTheParent, "behind another text"),
        (AddsToTheChain, "cached_chain"),
        (ServesThoseWhoOptOut, "use_prefix_cache=False"),
        (GivesCachedBlocks, "was looked up"),
        (LeavesTheCachesOwnList, "it was looked up again"),
        (AnswersAsBefore, "was handed out; a second look-up"),
    ],
    "05.eviction": [
        (found_first_in_first_out, "again and again"),
        (found_heads_first, "one block has to go"),
        (found_and_kept_for_ever, "room for 2"),
        (found_after_keeping, "one request"),
        (found_with_one_room_less, "room for"),
    ],
    "05.branch": [
        (branch_without_freeing, "number of copies"),
        (branch_one_by_one, "tokens in each new table"),
        (branch_that_hides_its_copies, "what each reads"),
        (branch_with_copies_backwards, "what each reads"),
        (branch_that_copies_for_all, "number of copies"),
    ],
    "05.recycled": [
        (LazyPrefixCache, "4 blocks of 4"),
        (AlwaysOverwrites, "4 blocks of 4"),
        (FindsNothing, "letters found in the cache"),
        (ForgetsTheFirst, "reads"),
        (ForgetsWhere, "reads"),
    ],
}
