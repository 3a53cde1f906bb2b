"""Exercises of notebook 05, prefix sharing: chain, look up, evict, copy before writing, and a bug hunt."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from labcore.course.exercises.nb05_planted import LazyPrefixCache
from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_attributes, expect_equal, show
from labcore.course.learner.text_engine import TextEngine
from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.kvcache.prefix import block_key
from labcore.request import Request
from labcore.sampling_params import SamplingParams

SENTENCES = ("the sea is calm", "the sea is wild", "the cat is calm", "a sea of cats", "the sea is calm today")


def chain_keys(tokens: Sequence[Any], block_size: int, key_of: Callable[[Any, Any], Any]) -> list[Any]:
    """The keys of the full blocks of a text, each made of the key before it and the block's own tokens."""
    keys, parent = [], b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = key_of(parent, tuple(tokens[start : start + block_size]))
        keys.append(parent)
    return keys


def blocks_found(trace: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks that a log's requests find, one after the other, in a cache of `capacity` blocks."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for blocks in trace:
        found += next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return found


def branch(beams: Sequence[BlockTable], parents: Sequence[int]) -> tuple[list[BlockTable], list[tuple[int, int]]]:
    """The tables of the next round, one for each parent named, a token longer; and the copies to make first."""
    for number, beam in enumerate(beams):
        if number not in parents:
            beam.free()
    taken_over: set[int] = set()
    tables = []
    for parent in parents:
        tables.append(beams[parent].fork() if parent in taken_over else beams[parent])
        taken_over.add(parent)
    copies = [table.copy_on_write() for table in tables]
    for table in tables:
        table.append(1)
    return tables, [copy for copy in copies if copy is not None]


class MendedLazyPrefixCache(LazyPrefixCache):
    """`LazyPrefixCache` as notebook 05 mends it: a block is evicted the moment it is handed out."""

    def evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holds.pop(block, None)


def check_chain(chain_keys: Any) -> None:
    def nested(parent: Any, block: Any) -> tuple[Any, ...]:
        return (parent, tuple(block))

    said = "chain_keys('abcdefghij', 4, key_of) was asked, key_of(parent, block) being the pair (parent, block)"
    first = (b"", tuple("abcd"))
    keys = chain_keys("abcdefghij", 4, nested)
    expect(isinstance(keys, list), f"{said}; it gave {show(keys)}", "a list of keys")
    expect_equal(len(keys), 2, f"{said}: the number of keys; 'ij' fills no block", hint=1)
    expect_equal(keys[0], first, f"{said}: the first key", hint=2)
    expect_equal(keys[1], (first, tuple("efgh")), f"{said}: the second key", hint=2)
    for length in range(14):
        keys = chain_keys(list(range(length)), 4, nested)
        said = f"chain_keys was asked for the keys of {length} tokens, block size 4"
        expect_equal(len(keys), length // 4, f"{said}: their number", hint=1)
    deep = chain_keys(list("abcdefghijkl"), 4, nested)[2]
    expect_equal(deep, ((first, tuple("efgh")), tuple("ijkl")), "the third key of 'abcdefghijkl', block size 4", hint=3)
    here, there = (chain_keys(text, 4, hash_pair) for text in ("the sea is calm", "the cat is calm"))
    agree = [a == b for a, b in zip(here, there, strict=True)]
    said = "“the sea is calm” and “the cat is calm” in blocks of 4: which of their keys agree"
    expect_equal(agree, [True, False, False], said, hint=3)


def hash_pair(parent: Any, block: Any) -> bytes:
    return block_key(bytes(parent), repr(tuple(block)).encode())


def check_match(HashedPrefixCache: Any) -> None:
    expect_attributes(HashedPrefixCache, "match", "cache_full_blocks", "evict")
    library = Library(HashedPrefixCache(4))
    expect_found(library, "the sea is calm", [], "nothing has been registered yet", hint=1)
    (the, sea, is_c) = library.put("the sea is calm")
    known = f"“the sea is calm” is registered, its full blocks being {the}, {sea} and {is_c}"
    expect_found(library, "the sea is calm", [the, sea, is_c], known, hint=1)
    expect_found(library, "the sea is wild", [the, sea], known, hint=1)
    expect_found(
        library, "the cat is calm", [the], f"{known}; block 2 of the new text holds the same letters as block {is_c}"
    )
    expect_found(library, "sea is calm", [], known)
    expect_found(library, "the sea is c", [the, sea], f"{known}; one token has to be left to compute", hint=2)
    expect_found(library, "the sea is cx", [the, sea, is_c], f"{known}; the 13th letter is left to compute", hint=2)
    expect_found(library, "the", [], known, hint=2)
    opted_out = asked("the sea is calm", use_prefix_cache=False)
    expect_equal(
        library.cache.match(opted_out), [], f"{known}; a request with use_prefix_cache=False asked for it", hint=2
    )
    check_chain_is_left(library, known, [the, sea])
    check_look_up_goes_on(HashedPrefixCache)
    check_collisions(HashedPrefixCache)
    check_many_texts(HashedPrefixCache)


def check_chain_is_left(library: Library, known: str, blocks: list[int]) -> None:
    request = asked("the sea is wild")
    for time in ("once", "twice, as a scheduler does while it waits for room"):
        library.cache.match(request)
        chain = [cached.block for cached in request.cached_chain]
        expect_equal(
            chain, blocks, f"{known}; “the sea is wild” was looked up {time}: the blocks in cached_chain", hint=3
        )


def check_look_up_goes_on(HashedPrefixCache: Any) -> None:
    """The same request is looked up again, after a block was handed out, and after it computed some of its own."""
    library = Library(HashedPrefixCache(4))
    the, sea, is_c = library.put("the sea is calm")
    known = f"“the sea is calm” is registered in blocks {the}, {sea} and {is_c}, and “the sea is calm.” was looked up"
    request = asked("the sea is calm.")
    library.cache.match(request)
    library.cache.evict([sea])
    expect_equal(library.cache.match(request), [the], f"{known}; block {sea} was handed out; a second look-up", hint=3)
    twin = library.put("the sea is calm")[1]
    expect_equal(
        library.cache.match(request)[:2], [the, twin], f"{known}; “sea ” went, and came again; a third look-up", hint=3
    )
    library = Library(HashedPrefixCache(4))
    the, sea, _ = library.put("the sea is calm")
    request = asked("the sea is wild")
    blocks = library.compute(request)
    said = f"“the sea is wild” found blocks {the} and {sea}, and computed and registered {blocks[2]}; it was looked up again"
    expect_equal(library.cache.match(request), blocks, said, hint=3)


def check_collisions(HashedPrefixCache: Any) -> None:
    def one_key(parent: bytes, content: bytes) -> bytes:
        return b"k"

    library = Library(HashedPrefixCache(4, one_key))
    library.put("blue!")
    said = "a hash gives every block the same key, and “blue” is registered"
    expect_found(library, "red!!", [], f"{said}; that block holds other tokens", hint=3)

    def content_only(parent: bytes, content: bytes) -> bytes:
        return content

    library = Library(HashedPrefixCache(4, content_only))
    (a, _) = library.put("aaaaxxxx.")
    (b, x) = library.put("bbbbxxxx.")
    said = f"a hash leaves the parent out; “bbbb” is block {b}, and block {x} holds the “xxxx” after it"
    expect_found(library, "aaaaxxxx.", [a], f"{said}; it was computed behind another text", hint=3)


def check_many_texts(HashedPrefixCache: Any) -> None:
    """The real scheduler, a small pool, three bits of hash: whatever is found must have been computed for this text."""

    def three_bits(parent: bytes, content: bytes) -> bytes:
        return bytes([block_key(parent, content)[0] & 7])

    desk = TextEngine(HashedPrefixCache(4, three_bits), num_blocks=9)
    for name, text in random_log(60):
        desk.submit(name, text, output=3)
        desk.run()
        said = f"60 texts ran one after the other, with a hash of 3 bits; {first(desk.foreign_reads)}"
        expect(not desk.foreign_reads, said, hint=3)


def check_eviction(blocks_found: Any) -> None:
    for trace, capacity, found, said in (
        ([], 4, 0, "no request at all"),
        ([[0, 1]], 4, 0, "one request, [0, 1]"),
        ([[0, 1], [0, 1, 2], [0, 3]], 9, 3, "[0, 1], [0, 1, 2], [0, 3], room for all"),
        ([[0], [1], [2], [0]], 2, 0, "[0], [1], [2], [0], room for 2"),
        ([[0], [1], [0], [2], [0]], 2, 2, "[0], [1], [0], [2], [0], room for 2: block 0 is in use again and again"),
        ([[0, 1, 2], [9], [0, 1, 2]], 3, 2, "[0, 1, 2], [9], [0, 1, 2], room for 3: one block has to go for block 9"),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 3, 3, "[0, 1, 2, 3] twice, room for 3"),
        ([[0, 1], [2, 3], [0, 4], [5, 6], [0, 1]], 4, 2, "[0, 1], [2, 3], [0, 4], [5, 6], [0, 1], room for 4"),
    ):
        expect_equal(blocks_found(trace, capacity), found, f"{said}: the number of blocks found", hint=hint_for(trace))
    dice = random.Random(5)
    for _ in range(40):
        trace, fresh = [[0]], 1
        for _ in range(30):
            parent, grown = dice.choice(trace), dice.randrange(3)
            trace.append([*parent[: dice.randrange(1, len(parent) + 1)], *range(fresh, fresh + grown)])
            fresh += grown
        capacity = dice.randrange(2, 20)
        said = f"30 requests by dice that begin alike, room for {capacity}: the number of blocks found"
        expect_equal(blocks_found(trace, capacity), OURS["blocks_found"](trace, capacity), said, hint=3)


def hint_for(trace: Sequence[Sequence[int]]) -> int:
    return 3 if any(len(blocks) > 2 for blocks in trace) else 2 if len(trace) > 3 else 1


def check_branch(branch: Any) -> None:
    for length in (6, 8):
        for parents, what in (
            ([0, 1, 2], "each beam goes on by itself"),
            ([0, 0, 1], "beam 0 goes on in two ways, beam 2 in none"),
            ([1, 1, 1], "beam 1 goes on in three ways, the others in none"),
            ([2, 0, 0], "beam 0 goes on in two ways, after beam 2"),
        ):
            grow(branch, length, [parents], f"three beams of {length} tokens, blocks of 4; {what}")
    grow(
        branch,
        6,
        [[0, 0], [0, 1]],
        "two beams of 6 tokens, blocks of 4; one goes on in two ways, then each by itself",
        2,
    )
    grow(branch, 5, [[0, 0], [1, 1]], "two beams, 3 blocks in all", width=2, num_blocks=3)
    dice = random.Random(0)
    for trace in range(40):
        rounds = [[dice.randrange(4) for _ in range(4)] for _ in range(10)]
        grow(branch, 3, rounds, f"four beams, parents by dice (trace {trace})", width=4, num_blocks=48)


def grow(
    branch: Any, length: int, rounds: Sequence[Sequence[int]], said: str, width: int = 3, num_blocks: int = 16
) -> None:
    """Run a search over a memory of letters; after each round check what each beam reads and which blocks it owns."""
    pool = BlockPool(num_blocks, 4)
    root = BlockTable(pool)
    memory = dict(zip(root.append(length), "abcdefgh"[:length], strict=True))
    beams: list[Any] = [root, *(root.fork() for _ in range(width - 1))]
    texts = ["abcdefgh"[:length]] * width
    for number, parents in enumerate(rounds, 1):
        now = f"{said}; round {number}, parents {show(list(parents))}"
        needed = copies_needed(pool, beams, parents)
        result = branch(list(beams), list(parents))
        expect(isinstance(result, tuple) and len(result) == 2, f"{now}; branch gave {show(result)}", "(tables, copies)")
        beams, copies = list(result[0]), [tuple(copy) for copy in result[1]]
        texts = [texts[parent] + chr(65 + 4 * number + k) for k, parent in enumerate(parents)]
        memory.update({4 * dst + i: memory.get(4 * src + i, "?") for src, dst in copies for i in range(4)})
        lengths = [table.num_tokens for table in beams]
        expect_equal(lengths, [len(text) for text in texts], f"{now}: tokens in each new table", hint=2)
        memory.update((table.slot_mapping()[-1], text[-1]) for table, text in zip(beams, texts, strict=True))
        read = ["".join(memory.get(slot, "?") for slot in table.slot_mapping()) for table in beams]
        expect_equal(read, texts, f"{now}, each wrote its letter: what each reads", hint=2)
        expect_equal(len(copies), needed, f"{now}: the number of copies", hint=3)
        listed = Counter(block for table in beams for block in table.blocks)
        for block in range(pool.num_blocks):
            known = f"{now}: the refcount of block {block}, which {listed[block]} tables list"
            expect_equal(pool.refcount(block), listed[block], known, hint=1)


def copies_needed(pool: BlockPool, beams: Sequence[Any], parents: Sequence[int]) -> int:
    """Every beam but the last that writes into a shared, partly filled block needs a copy."""
    tails = Counter(beams[parent].blocks[-1] for parent in parents if beams[parent].num_tokens % pool.block_size)
    return sum(writers - 1 for writers in tails.values())


def check_recycled(LazyPrefixCache: Any) -> None:
    expect_attributes(LazyPrefixCache, "match", "cache_full_blocks", "evict")
    desk = TextEngine(LazyPrefixCache, num_blocks=8)
    desk.submit("ana", SENTENCES[0])
    desk.run()
    again = desk.submit("again", SENTENCES[0])
    desk.run()
    said = "“the sea is calm” was asked twice, and nothing in between"
    expect_equal(again.num_cached_tokens, 12, f"{said}: letters found in the cache", hint=1)
    serve([("x", "aaaabbbb."), ("y", "ccccddddeeeeff"), ("x again", "aaaabbbb.")], LazyPrefixCache, 4, hint=2)
    serve(
        [("x", "aaaabbbb."), ("y", "ccccddddeeee"), ("z", "ccccddddeeee"), ("x again", "aaaabbbb.")],
        LazyPrefixCache,
        6,
        hint=3,
    )
    for seed in range(8):
        serve(random_log(40, seed), LazyPrefixCache, 6 + seed, hint=3)


def serve(log: Sequence[tuple[str, str]], cache: Any, num_blocks: int, hint: int) -> None:
    """Serve texts one after the other, then pairs of them at once, and mind what each reads."""
    for at_once in (1, 2):
        desk = TextEngine(cache, num_blocks=num_blocks)
        for number, (name, text) in enumerate(log):
            desk.submit(name, text)
            if number % at_once == 0:
                desk.run()
            said = (
                f"{len(log)} texts, {at_once} at a time, in a pool of {num_blocks} blocks of 4; {first(desk.foreign_reads)}"
            )
            expect(not desk.foreign_reads, said, hint=hint)
        desk.run()
        expect(not desk.foreign_reads, f"{len(log)} texts, {at_once} at a time; {first(desk.foreign_reads)}", hint=hint)


def first(found: Sequence[str]) -> str:
    return found[0] if found else ""


def random_log(length: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts that begin alike, and come back."""
    dice = random.Random(seed)
    texts = ["".join(dice.choice("abc") for _ in range(dice.randrange(5, 15))) for _ in range(8)]
    return [(f"r{i}", dice.choice(texts)[: dice.randrange(4, 15)] + dice.choice("xyz")) for i in range(length)]


class Library:
    """A cache and a pool to fill it from, without a scheduler."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.pool = BlockPool(32, cache.block_size)

    def put(self, text: str) -> list[int]:
        """A request for this text comes, is computed and registered; its full blocks are returned."""
        return self.compute(asked(text))

    def compute(self, request: Request) -> list[int]:
        """It finds what is there, computes the rest and registers it; its full blocks are returned."""
        found = list(self.cache.match(request))
        request.table = BlockTable(self.pool)
        request.table.attach_prefix(found)
        request.table.append(request.num_tokens - request.table.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.cache.cache_full_blocks(request)
        return request.table.blocks[: request.num_tokens // self.pool.block_size]


def asked(text: str, use_prefix_cache: bool = True) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request("r", [ord(letter) for letter in text], params, 0, 1, 0, use_prefix_cache=use_prefix_cache)


def expect_found(library: Library, text: str, blocks: list[int], said: str, hint: int = 1) -> None:
    found = library.cache.match(asked(text))
    expect(isinstance(found, list), f"{said}; match gave {show(found)}", "a list of blocks", hint)
    expect_equal(found, blocks, f"{said}. “{text}” was looked up", hint)


OURS = {"blocks_found": blocks_found}  # by name: inside of its check, a learner's function hides ours

EXERCISES = (
    Exercise(
        id="05.chain",
        title="a key that knows the whole beginning",
        minutes=8,
        difficulty=1,
        spec="`chain_keys(tokens, block_size, key_of)` returns a list with one key for each full block. Key i is "
        "`key_of(parent, block)`: block is the tuple of its tokens, parent is key i - 1, and b'' for the first.",
        check=check_chain,
        passed="one key a full block, each made of all that comes before it",
        hints=(
            "A block is full with block_size tokens. How many full blocks do 13 tokens make, with block size 4? Three; "
            "the last token has no key yet.",
            "Walk along the text, and carry the newest key with you: it is the parent of the next.",
            "Two texts may hold the same letters at the same place, and their keys must differ if anything before them "
            "does. So each key goes into the next, not only the block before.",
        ),
        reference="course.exercises.nb05.chain_keys",
    ),
    Exercise(
        id="05.match",
        title="found, and verified",
        minutes=15,
        difficulty=2,
        spec="`_find(key, content, parent)` returns the CachedBlock that is known under the key, holds the very "
        "tokens, and has this very parent; None if there is no such block. `match(request)` returns the blocks "
        "that hold the request's first tokens, in order, and never so many that no token is left to compute. The "
        "parent of each is the block found before it (None for the first). The first one that is not found ends "
        "the search. `self._resume(request)` gives what needn't be looked up again, CachedBlocks and "
        "blocks; what is found is added to both. The CachedBlocks are left in `request.cached_chain`, a new list at "
        "each call. With use_prefix_cache=False, nothing is found.",
        check=check_match,
        passed="finds what is there and leaves a token to compute; 60 texts under a hash of 3 bits, and none reads "
        "another's",
        hints=(
            "`_block_hashes(request, n)` gives (key, content) of the first n blocks, `_by_key` knows the CachedBlock "
            "under a key. Go along, from the first that `_resume` doesn't give you, until one is missing.",
            "Of 12 tokens in blocks of 4, only two blocks may be found: somebody has to compute the last token, or "
            "there is nothing to draw the next one from. How many blocks for 13?",
            "The key says where to look, and no more. Hold the content against yours, and the parent against the "
            "CachedBlock that you found one step before. The two lists of `_resume` stay the cache's own: leave a copy "
            "in cached_chain, which the request will add to, and return a copy.",
        ),
        reference="kvcache.prefix.HashedPrefixCache",
        methods=("_find", "match"),
    ),
    Exercise(
        id="05.eviction",
        title="who has to go",
        minutes=12,
        difficulty=2,
        spec="`blocks_found(trace, capacity)` serves the requests of a log one after the other, each a list of block "
        "ids from head to tail, and returns how many blocks are found in all. A request finds its blocks up to "
        "the first that is not kept; then all of its blocks are kept, as just used. While there are more than "
        "`capacity`, the least recently used goes, and of one request the tail before the head.",
        check=check_eviction,
        passed="the least recently used go first, tails before heads: 40 logs by dice, every hit counted",
        hints=(
            "Count first, then keep, then evict. Blocks are found from the head on, up to the first that is missing.",
            "A block that is found has been used just now: it moves to the young end, as if it were new. An "
            "OrderedDict has `move_to_end`.",
            "Within a request the head is to outlive the tail. So which of its blocks is the last to be marked as "
            "used?",
        ),
        reference="course.exercises.nb05.blocks_found",
    ),
    Exercise(
        id="05.branch",
        title="copy on write, for a family",
        minutes=15,
        difficulty=3,
        spec="`branch(beams, parents)` makes the tables of the next round: table k goes on from `beams[parents[k]]` "
        "and has room for one token more. Beams that nobody goes on from give their blocks back. It returns "
        "(tables, copies): the copies (src, dst) that have to be made before anybody writes, as few as possible. "
        "Afterwards each block's refcount is the number of new tables that list it.",
        check=check_branch,
        passed="nobody reads what a sibling wrote, each shared tail is copied once less than it has writers, no block "
        "is lost",
        hints=(
            "A beam that goes on in n ways needs n tables over its blocks, and there is one already. One that goes on "
            "in none has one too many.",
            "Fork first, for all of them; grow afterwards. A table that has grown already takes its new token along "
            "into every fork.",
            "`copy_on_write()` (notebook 02) says whether there is something to copy. The last of a family finds that "
            "it owns the tail alone by then. And those who end should give their blocks back before others take new "
            "ones.",
        ),
        reference="course.exercises.nb05.branch",
    ),
    BugHunt(
        id="05.recycled",
        title="bug hunt: right until somebody is slow",
        minutes=15,
        difficulty=3,
        spec="A block is found only if it holds, at that moment, KV that was computed for the very text that asks. "
        "What was registered, and not handed out since, is found.",
        check=check_recycled,
        passed="16 random logs in small pools: nothing foreign is read, and what is there is found",
        hints=(
            "Follow one block: who holds it, what `holds` says of it, what is in it. At which moments do the last two "
            "differ?",
            "`holds` is right again as soon as the new owner's block is registered. What if its text ends before the block is "
            "full?",
            "And what if the new owner's text was registered from another block already? The manager tells the cache "
            "of every block that it hands out, at the moment when it does: listen.",
        ),
        reference="course.exercises.nb05.MendedLazyPrefixCache",
        methods=("evict",),
        planted="course.exercises.nb05_planted.LazyPrefixCache",
        seen_in="GeeeekExplorer/nano-vllm#163",
    ),
)
