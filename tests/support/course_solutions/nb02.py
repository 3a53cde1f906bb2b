"""Right and wrong answers to the exercises of notebook 02: what the checks must accept and must refuse."""

from __future__ import annotations

from collections import Counter, deque

from labcore.course.exercises.nb02 import MendedBeams, audit
from labcore.course.exercises.nb02_planted import Beams
from labcore.kvcache.blocks import BlockError, BlockPool, BlockTable, OutOfBlocks


class DequePool:
    """A pool written from scratch, on a deque: no ring, no sentinel."""

    def __init__(self, num_blocks, block_size, free_order=None):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.waiting = deque(range(num_blocks) if free_order is None else free_order)
        self.owners = Counter()

    @property
    def num_free(self):
        return len(self.waiting)

    def free_blocks(self):
        return iter(self.waiting)

    def refcount(self, block):
        return self.owners[block]

    def allocate(self, n):
        if n > len(self.waiting):
            raise OutOfBlocks("too few")
        taken = [self.waiting.popleft() for _ in range(n)]
        self.owners.update(taken)
        return taken

    def share(self, blocks):
        self.owners.update(blocks)

    def free(self, blocks):
        given = Counter(blocks)
        if any(self.owners[block] < times for block, times in given.items()):
            raise BlockError("not yours")
        self.owners -= given
        self.waiting.extend(block for block in dict.fromkeys(blocks) if self.owners[block] == 0)


class UnlinksOneByOne(BlockPool):
    def allocate(self, n):
        ids = list(self.free_blocks())[:n]
        if len(ids) < n:
            raise OutOfBlocks("too few")
        self.incref(ids)
        return ids


class TakesUntilItFails(BlockPool):
    def allocate(self, n):
        taken = []
        for _ in range(n):
            if self.num_free == 0:
                raise OutOfBlocks("too few")
            taken += BlockPool.allocate(self, 1)
        return taken


class GivesWhatThereIs(BlockPool):
    def allocate(self, n):
        return super().allocate(min(n, self.num_free))


class ForgetsToCount(BlockPool):
    def allocate(self, n):
        taken = super().allocate(n)
        self.num_free += n
        return taken


class ForgetsTheOwner(BlockPool):
    def allocate(self, n):
        taken = super().allocate(n)
        for block in taken:
            self._refcounts[block] = 0
        return taken


class TakesFromTheTail(BlockPool):
    def allocate(self, n):
        if n > self.num_free:
            raise OutOfBlocks("too few")
        ids = list(self.free_blocks())[::-1][:n]
        self.incref(ids)
        return ids


class StopsOneShort(BlockPool):
    def allocate(self, n):
        if n >= self.num_free and n > 0:
            raise OutOfBlocks("too few")
        return super().allocate(n)


class LeavesTheRingOpen(BlockPool):
    """The new head doesn't learn that the sentinel stands before it."""

    def allocate(self, n):
        before = list(self._prev)
        taken = super().allocate(n)
        self._prev = before
        return taken


class LeavesThemInTheQueue(BlockPool):
    def allocate(self, n):
        if n > self.num_free:
            raise OutOfBlocks("too few")
        taken = list(self.free_blocks())[:n]
        for block in taken:
            self._refcounts[block] = 1
        self.num_free -= n
        return taken


class LooksFirst(BlockPool):
    def free(self, blocks):
        for block, times in Counter(blocks).items():
            if block not in range(self.num_blocks) or self._refcounts[block] < times:
                raise BlockError(f"block {block}")
        for block in blocks:
            self._refcounts[block] -= 1
        self._enqueue([block for block in dict.fromkeys(blocks) if self._refcounts[block] == 0])


class IgnoresASecondRelease(BlockPool):
    """The workaround that came with a real engine's bug report."""

    def free(self, blocks):
        for block in blocks:
            if self._refcounts[block] > 0:
                super().free([block])


class FreesUntilItFails(BlockPool):
    def free(self, blocks):
        for block in blocks:
            super().free([block])


class FreesWhatIsShared(BlockPool):
    def free(self, blocks):
        for block in dict.fromkeys(blocks):
            if not 0 <= block < self.num_blocks or self._refcounts[block] == 0:
                raise BlockError(f"block {block}")
            self._refcounts[block] = 0
        self._enqueue(list(dict.fromkeys(blocks)))


class CountsFromTheEnd(BlockPool):
    def free(self, blocks):
        super().free([block % self.num_blocks if block < 0 else block for block in blocks])


class PutsThemAtTheHead(BlockPool):
    def free(self, blocks):
        waiting = list(self.free_blocks())
        super().free(blocks)
        order = [*blocks, *waiting]
        self._next[self.num_blocks] = self._prev[self.num_blocks] = self.num_blocks
        self.num_free -= len(order)
        self._enqueue(order)


class QueuesTheSharedOnes(BlockPool):
    """Gives back one reference, as it should, and puts the block into the queue whatever is left."""

    def free(self, blocks):
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._refcounts[block] == 0:
                raise BlockError(f"block {block}")
        for block in blocks:
            self._refcounts[block] -= 1
        self._enqueue(blocks)


class GrowsByHand(BlockTable):
    def append(self, n):
        size = self.pool.block_size
        room = len(self.blocks) * size - self.num_tokens
        fresh = self.pool.allocate((n - room + size - 1) // size if n > room else 0)
        self.blocks.extend(fresh)
        slots = []
        for _ in range(n):
            logical, offset = divmod(self.num_tokens, size)
            slots.append(self.blocks[logical] * size + offset)
            self.num_tokens += 1
        return slots


class TakesABlockEarly(BlockTable):
    def append(self, n):
        missing = (self.num_tokens + n) // self.pool.block_size + 1 - len(self.blocks)
        self.blocks += self.pool.allocate(max(0, missing))
        self.num_tokens += n
        return self.slot_mapping(self.num_tokens - n)


class ChargesInFull(BlockTable):
    """The second and every later call pays for the blocks that are there already."""

    def append(self, n):
        if self.num_tokens + n > len(self.blocks) * self.pool.block_size:
            self.blocks += self.pool.allocate(-(-(self.num_tokens + n) // self.pool.block_size))
        self.num_tokens += n
        return self.slot_mapping(self.num_tokens - n)


class CountsTooSoon(BlockTable):
    def append(self, n):
        self.num_tokens += n
        missing = -(-self.num_tokens // self.pool.block_size) - len(self.blocks)
        self.blocks += self.pool.allocate(max(0, missing))
        return self.slot_mapping(self.num_tokens - n)


class TakesBlockByBlock(BlockTable):
    def append(self, n):
        while len(self.blocks) * self.pool.block_size < self.num_tokens + n:
            self.blocks += self.pool.allocate(1)
        self.num_tokens += n
        return self.slot_mapping(self.num_tokens - n)


class GivesPositions(BlockTable):
    def append(self, n):
        super().append(n)
        return list(range(self.num_tokens - n, self.num_tokens))


class AsksOneAheadOfTime(BlockTable):
    """Wants a free block whenever its block is about to fill up, also when the last slot is still free."""

    def append(self, n):
        if n and (self.num_tokens + n) % self.pool.block_size == 0 and self.pool.num_free == 0:
            raise OutOfBlocks("soon")
        return super().append(n)


class CopiesByRefcount(BlockTable):
    def copy_on_write(self):
        if self.num_tokens % self.pool.block_size == 0:
            return None
        last = self.blocks[-1]
        if self.pool.refcount(last) == 1:
            return None
        fresh = self.pool.allocate(1)[0]
        self.blocks = [*self.blocks[:-1], fresh]
        self.pool.free([last])
        return (last, fresh)


class KeepsTheOldReference(BlockTable):
    def copy_on_write(self):
        if not self._tail_is_shared():
            return None
        shared = self.blocks[-1]
        (self.blocks[-1],) = self.pool.allocate(1)
        return shared, self.blocks[-1]


class CopiesWhatItOwnsAlone(BlockTable):
    def copy_on_write(self):
        if self.num_tokens % self.pool.block_size == 0:
            return None
        last = self.blocks[-1]
        (self.blocks[-1],) = self.pool.allocate(1)
        self.pool.free([last])
        return last, self.blocks[-1]


class CopiesFullBlocks(BlockTable):
    def copy_on_write(self):
        if not self.blocks or self.pool.is_writable(self.blocks[-1]):
            return None
        last = self.blocks[-1]
        (self.blocks[-1],) = self.pool.allocate(1)
        self.pool.free([last])
        return last, self.blocks[-1]


class TellsItBackwards(BlockTable):
    def copy_on_write(self):
        copy = super().copy_on_write()
        return copy and copy[::-1]


class GivesBackBeforeItTakes(BlockTable):
    def copy_on_write(self):
        if not self._tail_is_shared():
            return None
        shared = self.blocks[-1]
        self.pool.free([shared])
        (self.blocks[-1],) = self.pool.allocate(1)
        return shared, self.blocks[-1]


class StaysWhereItIs(BlockTable):
    """Takes a block and tells of the copy, and goes on writing into the shared one."""

    def copy_on_write(self):
        if not self._tail_is_shared():
            return None
        (own,) = self.pool.allocate(1)
        self.pool.free([self.blocks[-1]])
        return self.blocks[-1], own


def audit_by_hand(pool, tables):
    wrong = {}
    for block in range(pool.num_blocks):
        count = sum(table.blocks.count(block) for table in tables)
        if count != pool.refcount(block):
            wrong[block] = (pool.refcount(block), count)
    return wrong


def audit_of_listed_blocks(pool, tables):
    listed = Counter(block for table in tables for block in table.blocks)
    return {block: (pool.refcount(block), n) for block, n in listed.items() if pool.refcount(block) != n}


def audit_without_counting(pool, tables):
    listed = {block for table in tables for block in table.blocks}
    owners = {block: (pool.refcount(block), int(block in listed)) for block in range(pool.num_blocks)}
    return {block: pair for block, pair in owners.items() if pair[0] != pair[1]}


def audit_of_owned_blocks(pool, tables):
    return {block: pair for block, pair in audit(pool, tables).items() if pair[0] > 0}


def audit_the_other_way_round(pool, tables):
    return {block: pair[::-1] for block, pair in audit(pool, tables).items()}


def audit_with_a_verdict(pool, tables):
    return not audit(pool, tables)


class ForksForAllButOne(Beams):
    def advance(self, parents):
        for beam, row in enumerate(self.rows):
            for _ in range(parents.count(beam) - 1):
                self.pool.share(row)
            if beam not in parents:
                self.pool.free(row)
        self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]


class IgnoresWhatThePoolSays(Beams):
    """The crash is gone, and the mistake is not."""

    def advance(self, parents):
        try:
            super().advance(parents)
        except BlockError:
            self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]

    def finish(self):
        for row in self.rows:
            try:
                self.pool.free(row)
            except BlockError:
                pass
        self.rows = []


class ForksOnceTooOften(Beams):
    def advance(self, parents):
        for beam, row in enumerate(self.rows):
            for _ in range(parents.count(beam)):
                self.pool.share(row)
            if beam not in parents:
                self.pool.free(row)
        self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]


class NeverEndsABeam(Beams):
    def advance(self, parents):
        for beam, row in enumerate(self.rows):
            for _ in range(parents.count(beam) - 1):
                self.pool.share(row)
        self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]


class CopiesNothing(Beams):
    """Shares nothing at all: sound books, and every beam has lost what it had in common."""

    def advance(self, parents):
        length = len(self.rows[0]) + 1
        for row in self.rows:
            self.pool.free(row)
        self.rows = [self.pool.allocate(length) for _ in parents]


RIGHT = {
    "02.allocate": [BlockPool, DequePool, UnlinksOneByOne],
    "02.free": [BlockPool, DequePool, LooksFirst],
    "02.append": [BlockTable, GrowsByHand],
    "02.copy_on_write": [BlockTable, CopiesByRefcount],
    "02.audit": [audit, audit_by_hand],
    "02.beams": [MendedBeams, ForksForAllButOne],
}

WRONG = {
    "02.allocate": [
        (TakesUntilItFails, "allocate(5) was refused, and changed num_free from 4 to 0"),
        (GivesWhatThereIs, "allocate(5) was asked with 4 blocks free; it was not refused"),
        (ForgetsToCount, "num_free, after 2 of 6 blocks were taken. expected 4, got 6"),
        (ForgetsTheOwner, "the refcount of block 4, after it was taken. expected 1, got 0"),
        (TakesFromTheTail, "expected [4, 0], got [3, 1]"),
        (StopsOneShort, "allocate(4) was asked with exactly 4 blocks free; it was refused"),
        (LeavesTheRingOpen, "after all were taken and block 5 was put back. expected [5], got []"),
        (LeavesThemInTheQueue, "the free queue, after blocks 4 and 0 were taken. expected [2, 5, 1, 3]"),
    ],
    "02.free": [
        (IgnoresASecondRelease, "free([3]) was asked (it is free already); it was not refused"),
        (FreesUntilItFails, "(twice, and it has one owner) and was refused, and changed num_free from 2 to 3"),
        (FreesWhatIsShared, "block 2 had two owners, and one of them gave it back: it stands in the free queue"),
        (QueuesTheSharedOnes, "block 2 had two owners, and one of them gave it back: it stands in the free queue"),
        (CountsFromTheEnd, "free([-2]) was asked (no block has a negative id); it was not refused"),
        (PutsThemAtTheHead, "after block 0 was given back. expected [1, 3, 0], got [0, 1, 3]"),
    ],
    "02.append": [
        (TakesABlockEarly, "its block has a free slot, the pool has no free block; it was refused with OutOfBlocks"),
        (ChargesInFull, "a table of 4 tokens asked for a fifth with one block free; it was refused with OutOfBlocks"),
        (CountsTooSoon, "and changed num_tokens from 4 to 5"),
        (TakesBlockByBlock, "2 blocks free, one too few; it was refused, and changed num_free from 2 to 0"),
        (GivesPositions, "expected [16, 17, 18, 19, 0, 1], got [0, 1, 2, 3, 4, 5]"),
        (AsksOneAheadOfTime, "its block has a free slot, the pool has no free block; it was refused with OutOfBlocks"),
    ],
    "02.copy_on_write": [
        (KeepsTheOldReference, "the refcount of block 0 now. expected 1, got 2"),
        (CopiesWhatItOwnsAlone, "a table that shares nothing asked for copy_on_write(), and got (0, 2)"),
        (CopiesFullBlocks, "a fork of 8 tokens, whose last block is full, asked for copy_on_write(), and got (0, 2)"),
        (TellsItBackwards, "expected (0, 2), got (2, 0)"),
        (GivesBackBeforeItTakes, "it was refused, and changed the refcounts"),
        (StaysWhereItIs, "the fork's blocks now. expected [4, 2], got [4, 0]"),
    ],
    "02.audit": [
        (audit_of_listed_blocks, "was taken, and no table lists it"),
        (audit_without_counting, "in which two tables share a block. expected {}"),
        (audit_of_owned_blocks, "was freed twice behind their backs"),
        (audit_the_other_way_round, "expected {6: (1, 0)}, got {6: (0, 1)}"),
        (audit_with_a_verdict, "audit gave True. expected an empty dictionary"),
    ],
    "02.beams": [
        (Beams, "beam 1 feeds three; step 1 with parents [1, 1, 1, 0]: the refcount of block 0, which 4 rows list"),
        (IgnoresWhatThePoolSays, "beam 1 feeds three"),
        (ForksOnceTooOften, "each beam goes on by itself"),
        (NeverEndsABeam, "beam 0 feeds two, and beam 3 ends"),
        (CopiesNothing, "all blocks but the newest"),
    ],
}
