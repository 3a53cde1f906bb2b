"""Exercises of notebook 02, the block allocator: take, give back, grow, copy before writing, audit, and a bug hunt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from labcore.course.exercises.nb02_planted import Beams
from labcore.course.learner.exercise import BugHunt, Exercise, expect, expect_attributes, expect_equal, show
from labcore.kvcache.blocks import BlockPool, BlockTable

ORDER = (4, 0, 2, 5, 1, 3)  # a free queue in which no block stands at the place of its id
REFUSALS = ("OutOfBlocks", "BlockError")  # by name: the learner's classes are their own


def audit(pool: BlockPool, tables: Sequence[BlockTable]) -> dict[int, tuple[int, int]]:
    """Block → (its refcount, how many tables list it), for every block where the two differ."""
    listed = Counter(block for table in tables for block in table.blocks)
    counts = {block: (pool.refcount(block), listed[block]) for block in range(pool.num_blocks)}
    return {block: pair for block, pair in counts.items() if pair[0] != pair[1]}


class MendedBeams(Beams):
    """`Beams` as notebook 02 mends it: a row that feeds n beams gains n - 1 owners."""

    def advance(self, parents: Sequence[int]) -> None:
        for parent in parents:
            self.pool.share(self.rows[parent])
        for row in self.rows:
            self.pool.free(row)
        self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]


def check_allocate(BlockPool: Any) -> None:
    expect_attributes(BlockPool, "free_blocks", "refcount", "allocate")
    pool = BlockPool(6, 4, free_order=ORDER)
    taken = pool.allocate(2)
    asked = "allocate(2) was asked of a pool whose free queue is 4 0 2 5 1 3"
    expect(isinstance(taken, list), f"{asked}, and gave {show(taken)}", "a list of 2 block ids")
    expect_equal(taken, [4, 0], asked)
    expect_equal(pool.num_free, 4, "num_free, after 2 of 6 blocks were taken", hint=2)
    expect_equal(free_queue(pool), [2, 5, 1, 3], "the free queue, after blocks 4 and 0 were taken", hint=2)
    for block in taken:
        expect_equal(pool.refcount(block), 1, f"the refcount of block {block}, after it was taken", hint=2)
    before = state(pool)
    expect_refused("OutOfBlocks", lambda: pool.allocate(5), "allocate(5) was asked with 4 blocks free")
    expect_same(before, pool, "allocate(5) was refused")
    expect_equal(pool.allocate(0), [], "allocate(0) was asked", hint=3)
    expect_same(before, pool, "allocate(0) was asked", hint=3)
    expect_refused(None, lambda: pool.allocate(4), "allocate(4) was asked with exactly 4 blocks free", hint=3)
    expect_equal((pool.num_free, free_queue(pool)), (0, []), "num_free and free queue, after all were taken", hint=3)
    put_back = getattr(pool, "_enqueue", None)  # a pool written from scratch may do without
    if put_back is not None:
        put_back([5])
        expect_equal(free_queue(pool), [5], "the free queue, after all were taken and block 5 was put back", hint=3)


def check_free(BlockPool: Any) -> None:
    expect_attributes(BlockPool, "allocate", "share", "refcount", "free")
    pool = four_taken(BlockPool)
    pool.free([0])
    expect_equal(pool.refcount(0), 0, "the refcount of block 0, after its only owner gave it back")
    expect_equal(pool.num_free, 3, "num_free, after a third block was given back to the 2 free ones")
    expect_equal(free_queue(pool), [1, 3, 0], "the free queue, once 1 3, after block 0 was given back")
    pool.free([5, 2])
    expect_equal(free_queue(pool), [1, 3, 0, 5, 2], "the free queue, after 5 and 2 were given back, too, in this order")
    check_free_shared(BlockPool)
    for blocks, why in (
        ([3], "it is free already"),
        ([4, 4], "twice, and it has one owner"),
        ([4, 3], "block 3 is free already"),
        ([4, 6], "a pool of 6 has no block 6"),
        ([-2], "no block has a negative id"),
    ):
        pool = four_taken(BlockPool)
        before = state(pool)
        asked = f"free({blocks}) was asked ({why})"
        expect_refused("BlockError", lambda pool=pool, blocks=blocks: pool.free(blocks), asked, hint=3)
        expect_same(before, pool, f"{asked} and was refused", hint=3)


def check_free_shared(BlockPool: Any) -> None:
    pool = four_taken(BlockPool)
    pool.share([2])
    pool.free([2])
    said = "block 2 had two owners, and one of them gave it back"
    expect(2 not in free_queue(pool), f"{said}: it stands in the free queue", "it to stay with its other owner", hint=2)
    expect_equal(pool.refcount(2), 1, f"{said}: its refcount now", hint=2)
    pool.free([2])
    expect_equal(pool.refcount(2), 0, "the refcount of block 2, after both its owners gave it back", hint=2)
    expect_equal(free_queue(pool), [1, 3, 2], "the free queue, after both owners of block 2 gave it back", hint=2)
    pool.share([0])
    pool.free([0, 0])
    said = "the free queue, after both owners of block 0 gave it back in one call"
    expect_equal(free_queue(pool), [1, 3, 2, 0], said, hint=2)


def check_append(BlockTable: Any) -> None:
    expect_attributes(BlockTable, "append")
    pool = pool_of(6)
    table = BlockTable(pool)
    slots = table.append(6)
    asked = "append(6) was asked of an empty table, the pool's free queue being 4 0 2 5 1 3, block size 4"
    expect(isinstance(slots, list), f"{asked}; it gave {show(slots)}", "a list of 6 slots", hint=2)
    expect_equal(table.blocks, [4, 0], f"{asked}: the table's blocks now")
    expect_equal(table.num_tokens, 6, f"{asked}: num_tokens now", hint=2)
    expect_equal(slots, [16, 17, 18, 19, 0, 1], asked, hint=2)
    expect_equal(table.append(2), [2, 3], "append(2) was asked of a table of 6 tokens in blocks 4 and 0", hint=2)
    expect_equal(table.append(0), [], "append(0) was asked", hint=2)
    check_boundary(BlockTable)
    for length in range(1, 14):
        pool = pool_of(16)
        table = BlockTable(pool)
        table.append(length)
        for _ in range(8):
            table.append(1)
            said = f"a table began with {length} tokens and grew by one at a time to {table.num_tokens}"
            expect_equal(16 - pool.num_free, -(-table.num_tokens // 4), f"blocks taken from the pool, after {said}")
    pool = pool_of(3)
    table = BlockTable(pool)
    table.append(3)
    before = state(pool, table)
    asked = "append(10) was asked of a table of 3 tokens with 2 blocks free, one too few"
    expect_refused("OutOfBlocks", lambda: table.append(10), asked, hint=3)
    expect_same(before, pool, f"{asked}; it was refused", table, hint=3)


def check_boundary(BlockTable: Any) -> None:
    """3 → 4 → 5 tokens in blocks of 4 while the pool is empty: where every pager breaks first."""
    pool = pool_of(2)
    table = BlockTable(pool)
    table.append(3)
    (other,) = pool.allocate(1)
    before = state(pool)
    asked = "a table of 3 tokens asked for a fourth: its block has a free slot, the pool has no free block"
    expect_refused(None, lambda: table.append(1), asked)
    expect_same(before, pool, "a table of 3 tokens grew to 4, within its block")
    before = state(pool, table)
    asked = "a table of 4 tokens asked for a fifth with no block free"
    expect_refused("OutOfBlocks", lambda: table.append(1), asked)
    expect_same(before, pool, f"{asked}; it was refused", table, hint=3)
    pool.free([other])
    expect_refused(None, lambda: table.append(1), "a table of 4 tokens asked for a fifth with one block free")
    expect_equal(len(table.blocks), 2, "the number of its blocks, after a table of 4 tokens grew to 5")


def check_copy_on_write(BlockTable: Any) -> None:
    expect_attributes(BlockTable, "append", "copy_on_write")
    pool = pool_of(6)
    bo = BlockTable(pool)
    expect_nothing_to_copy(bo, "an empty table")
    bo.append(6)
    expect_nothing_to_copy(bo, "a table that shares nothing")
    child = fork_of(bo)
    copy = child.copy_on_write()
    asked = "a fork of 6 tokens in the shared blocks 4 and 0 asked for copy_on_write(), block 2 being the next free"
    expect(isinstance(copy, tuple), f"{asked}, and got {show(copy)}", "the pair (src, dst)")
    expect_equal(copy, (0, 2), asked)
    said = "block 2 took the place of the shared block 0 in a fork's table"
    expect_equal(child.blocks, [4, 2], f"{said}: the fork's blocks now", hint=2)
    expect_equal(bo.blocks, [4, 0], f"{said}: its parent's blocks now", hint=2)
    for block, owners in ((4, 2), (0, 1), (2, 1)):
        expect_equal(pool.refcount(block), owners, f"{said}: the refcount of block {block} now", hint=2)
    expect_nothing_to_copy(bo, "the parent, after the fork has taken its copy,")
    full = BlockTable(pool_of(6))
    full.append(8)
    expect_nothing_to_copy(fork_of(full), "a fork of 8 tokens, whose last block is full,")
    check_nobody_sees_anothers_write(BlockTable)
    pool = pool_of(2)
    bo = BlockTable(pool)
    bo.append(6)
    child = fork_of(bo)
    before = state(pool, child)
    asked = "a fork asked for copy_on_write() with no block free"
    expect_refused("OutOfBlocks", child.copy_on_write, asked, hint=3)
    expect_same(before, pool, f"{asked}; it was refused", child, hint=3)


def check_nobody_sees_anothers_write(BlockTable: Any) -> None:
    """Bo and two children write in turn, and each must go on reading what was written for it."""
    bo = BlockTable(pool_of(12))
    memory: dict[int, str] = dict(zip(bo.append(6), "abcdef", strict=True))
    tables = {"Bo": bo, "child 1": fork_of(bo), "child 2": fork_of(bo)}
    texts = dict.fromkeys(tables, "abcdef")
    for who, text in (("child 1", "X"), ("Bo", "g"), ("child 2", "YZ"), ("Bo", "hi"), ("child 1", "W")):
        copy = tables[who].copy_on_write()
        if copy is not None:
            src, dst = copy
            memory.update({4 * dst + i: memory.get(4 * src + i, "?") for i in range(4)})
        memory.update(zip(tables[who].append(len(text)), text, strict=True))
        texts[who] += text
        for reader, table in tables.items():
            read = "".join(memory[slot] for slot in table.slot_mapping())
            said = f"Bo and two forks of his share “abcdef”; {who} wrote “{text}”, and {reader} now reads “{read}”"
            expect(read == texts[reader], said, f"“{texts[reader]}”", hint=2)


def check_audit(audit: Any) -> None:
    expect(callable(audit), f"audit is {show(audit)}", "a function of a pool and a list of tables")
    pool = pool_of(8)
    tables = [BlockTable(pool) for _ in range(3)]
    for table, length in zip(tables, (6, 3, 9), strict=True):
        table.append(length)
    tables.append(tables[1].fork())
    found = audit(pool, tables)
    asked = "a sound pool was audited, in which two tables share a block"
    expect(isinstance(found, dict), f"{asked}; audit gave {show(found)}", "an empty dictionary: {}")
    expect_equal(found, {}, asked, hint=2)
    (leaked,) = pool.allocate(1)
    expect_equal(audit(pool, tables), {leaked: (1, 0)}, f"block {leaked} was taken, and no table lists it")
    pool.free([leaked])
    shared = tables[1].blocks[0]
    pool.free([shared])
    said = f"block {shared} stands in two tables, and was freed once behind their backs"
    expect_equal(audit(pool, tables), {shared: (1, 2)}, said, hint=2)
    pool.free([shared])
    said = f"block {shared} stands in two tables, and was freed twice behind their backs"
    expect_equal(audit(pool, tables), {shared: (0, 2)}, said, hint=2)


def check_beams(Beams: Any) -> None:
    expect_attributes(Beams, "advance", "finish")
    for parents, what in (
        ((0, 1, 2, 3), "each beam goes on by itself"),
        ((0, 0, 1, 2), "beam 0 feeds two, and beam 3 ends"),
        ((1, 1, 1, 0), "beam 1 feeds three"),
        ((2, 2, 2, 2), "beam 2 feeds all four"),
    ):
        search_beams(Beams, [parents], f"a prompt of 3 tokens, 4 beams; {what}")
    dice = random.Random(0)
    for trace in range(60):
        steps = [tuple(dice.randrange(4) for _ in range(4)) for _ in range(12)]
        search_beams(Beams, steps, f"a prompt of 3 tokens, 4 beams, parents by dice (trace {trace})")


def search_beams(Beams: Any, steps: Sequence[Sequence[int]], said: str) -> None:
    """Run a beam search and recount the owners of every block after each step."""
    pool = pool_of(64)
    beams = Beams(pool, num_prompt_tokens=3, width=4)
    for number, parents in enumerate(steps, 1):
        now = f"{said}; step {number} with parents {show(list(parents))}"
        before = [list(row) for row in beams.rows]
        expect_refused(None, lambda parents=parents: beams.advance(list(parents)), now, hint=2)
        rows = [list(row) for row in beams.rows]
        inherited = [row[:-1] for row in rows]
        expect_equal(inherited, [before[parent] for parent in parents], f"{now}: all blocks but the newest", hint=3)
        listed = Counter(block for row in rows for block in row)
        for block in range(pool.num_blocks):
            known = f"{now}: the refcount of block {block}, which {listed[block]} rows list"
            expect_equal(pool.refcount(block), listed[block], known, hint=2 if listed[block] else 3)
    expect_refused(None, beams.finish, f"{said}; all beams ended", hint=2)
    expect_equal(pool.num_free, 64, f"{said}; num_free of 64, after all beams ended", hint=3)


def pool_of(num_blocks: int) -> BlockPool:
    """labcore's own pool, block size 4, for the checks of everything that stands on a pool. It begins with ORDER."""
    order = [block for block in ORDER if block < num_blocks]
    return BlockPool(num_blocks, 4, free_order=[*order, *range(len(order), num_blocks)])


def fork_of(table: Any) -> Any:
    """A second table over the same blocks, of the same class: the learner's, whatever class their `fork` makes."""
    child = type(table)(table.pool)
    table.pool.share(table.blocks)
    child.blocks, child.num_tokens = list(table.blocks), table.num_tokens
    return child


def four_taken(BlockPool: Any) -> Any:
    """A pool of 6 whose blocks 4, 0, 2 and 5 are taken; its free queue is 1 3."""
    pool = BlockPool(6, 4, free_order=ORDER)
    pool.allocate(4)
    return pool


def free_queue(pool: Any) -> list[int]:
    """The free queue in order. A broken ring never comes to its end; nobody shall have to wait for it."""
    blocks = list(islice(pool.free_blocks(), pool.num_blocks + 1))
    ends = len(blocks) <= pool.num_blocks
    expect(ends, f"the free queue runs in circles: {show(blocks)}", "each free block once", hint=3)
    return blocks


def state(pool: Any, table: Any = None) -> dict[str, Any]:
    """All that a refused call must leave as it was."""
    refcounts = [pool.refcount(block) for block in range(pool.num_blocks)]
    found = {"num_free": pool.num_free, "the free queue": free_queue(pool), "the refcounts": refcounts}
    return found if table is None else found | {"its blocks": list(table.blocks), "num_tokens": table.num_tokens}


def expect_same(before: dict[str, Any], pool: Any, said: str, table: Any = None, hint: int = 1) -> None:
    """Go on if nothing has changed; otherwise tell what did."""
    for name, value in state(pool, table).items():
        changed = f"{said}, and changed {name} from {show(before[name])} to {show(value)}"
        expect(value == before[name], changed, "nothing to change", hint)


def expect_refused(error: str | None, call: Callable[[], Any], said: str, hint: int = 1) -> None:
    """Go on if the call is refused with the error of this name; with None, if it is not refused."""
    try:
        call()
        got = None
    except (RuntimeError, ValueError) as raised:
        if type(raised).__name__ not in REFUSALS:
            raise
        got = type(raised).__name__
    came = "it was not refused" if got is None else f"it was refused with {got}"
    expect(got == error, f"{said}; {came}", f"{error} to be raised" if error else "no refusal", hint)


def expect_nothing_to_copy(table: Any, who: str) -> None:
    """Go on if copy_on_write() gives None and takes no block."""
    free = table.pool.num_free
    copy = table.copy_on_write()
    expect(copy is None, f"{who} asked for copy_on_write(), and got {show(copy)}", "None: nothing to copy", hint=1)
    expect_equal(table.pool.num_free, free, f"{who} asked for copy_on_write(): num_free now", hint=1)


EXERCISES = (
    Exercise(
        id="02.allocate",
        title="allocate, all or nothing",
        minutes=10,
        difficulty=1,
        spec="`allocate(n)` takes n blocks from the head of the free queue, gives each one owner, and returns them in "
        "that order. If fewer than n are free it raises `OutOfBlocks`, and nothing has changed.",
        check=check_allocate,
        passed="takes from the head, in order, and takes none when there are too few",
        hints=(
            "Before you take the first block, you can already know whether there are enough.",
            "Three things know of a taken block: the queue (it is gone), num_free (one fewer), its refcount (1).",
            "The ring has to close again: the sentinel and the new head point at each other, also when the new head is "
            "the sentinel itself. With n = 0 that changes nothing.",
        ),
        reference="kvcache.blocks.BlockPool",
        methods=("allocate",),
    ),
    Exercise(
        id="02.free",
        title="give back, once and not twice",
        minutes=12,
        difficulty=2,
        spec="`free(blocks)` gives back one reference on each block. Those that have no owner left join the free queue "
        "at its tail, in the order given. A block that is free already, or that the pool doesn't have, raises "
        "`BlockError`, and nothing has changed; the same block twice in one call is two references.",
        check=check_free,
        passed="gives back one reference each, keeps what is still owned, refuses the second release of a block",
        hints=(
            "A block whose refcount falls to 0 is free: zero owners, at the tail of the queue, counted in num_free.",
            "Giving back a reference and freeing a block are two things. Which blocks go into the queue?",
            "Find out whether all of them can be given back before you change anything; or remember what you changed, "
            "and undo it. In Python, -2 is a valid index: ask for the range.",
        ),
        reference="kvcache.blocks.BlockPool",
        methods=("free",),
    ),
    Exercise(
        id="02.append",
        title="grow across a boundary",
        minutes=10,
        difficulty=2,
        spec="`append(n)` makes room for n more tokens and returns their slots. It takes from the pool exactly the "
        "blocks that are missing, none while the last block has room. If the pool can't serve them all, "
        "`OutOfBlocks` goes through to the caller, and table and pool are as before.",
        check=check_append,
        passed="holds ⌈tokens / block size⌉ blocks at every length, and stays as it was when the pool is out of blocks",
        hints=(
            "How many blocks does the table need for its new length, and how many does it have? A block size of 4 "
            "breaks at lengths 4 and 5: try them on paper.",
            "The slots of the new tokens are those from the old length up to the new one; `slot_mapping` knows them.",
            "Ask the pool once, for all missing blocks, before you touch anything of the table's own.",
        ),
        reference="kvcache.blocks.BlockTable",
        methods=("append",),
    ),
    Exercise(
        id="02.copy_on_write",
        title="copy on write",
        minutes=12,
        difficulty=2,
        spec="`copy_on_write()` returns None if the next token may be written where it is: the last block is full, or "
        "has one owner. Otherwise it takes a fresh block in place of the shared one, gives its reference on the "
        "shared one back, and returns (src, dst): the copy that is still to be made. If no block is free, "
        "`OutOfBlocks`, and nothing has changed.",
        check=check_copy_on_write,
        passed="copies the half-filled shared block and no other, and nobody reads what another one wrote",
        hints=(
            "`_tail_is_shared` knows when there is something to do; in all other cases there is not.",
            "After the copy this table owns the new block alone, and one owner fewer is left on the old one. Did the "
            "pool hear of both? Is the new block in the table, and in this table only?",
            "Take first, give back afterwards: if taking fails, nothing has happened yet.",
        ),
        reference="kvcache.blocks.BlockTable",
        methods=("copy_on_write",),
    ),
    Exercise(
        id="02.audit",
        title="an auditor",
        minutes=8,
        difficulty=1,
        spec="`audit(pool, tables)` recounts. It returns a dictionary, block → (its refcount, how many tables list "
        "it), of all blocks of the pool where these two numbers differ; an empty one if the books are in order.",
        check=check_audit,
        passed="finds what leaked, and what was freed under somebody's feet",
        hints=(
            "Go over all blocks of the pool, not over those in the tables: a leaked block is one that no table lists.",
            "A block may stand in many tables, and each of them is an owner. Count; don't just collect.",
        ),
        reference="course.exercises.nb02.audit",
    ),
    BugHunt(
        id="02.beams",
        title="bug hunt: it breaks far from the mistake",
        minutes=15,
        difficulty=3,
        spec="After every `advance(parents)`, beam k has the blocks of the old beam parents[k] and one new block; the "
        "refcount of each block is the number of rows that list it. After `finish()`, every block is free.",
        check=check_beams,
        passed="60 beam searches by dice, 12 steps each: every block has as many owners as rows, and all come back",
        hints=(
            "Audit after every step, and look at the first one whose books are wrong. What is special about its "
            "parents?",
            "How many rows list the blocks of a beam that feeds two others? And of one that feeds three? What does the "
            "pool believe?",
            "A beam that feeds n others needs n owners and has one; a beam that feeds none has one too many.",
        ),
        reference="course.exercises.nb02.MendedBeams",
        methods=("advance",),
        planted="course.exercises.nb02_planted.Beams",
        seen_in="vllm-project/vllm#1584",
    ),
)
