"""Block pool and block tables: virtual memory for the KV cache. Built in notebook 02.

The pool cuts the KV cache into blocks of `block_size` tokens. A sequence is a row of *logical* blocks, and its table
says which *physical* block holds each, so that a sequence needs no two neighbouring blocks and no more than it fills.

    logical    0    1    2            token 37 with block_size 16:
    table    [ 7,   3,  19 ]          logical 37 // 16 = 2  → physical 19
    tokens   16 + 16 +  6             slot 19 * 16 + 37 % 16 = 309

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for. Nothing was taken."""


class BlockError(ValueError):
    """A block without an owner was used, or one with several was to be written. Nothing was changed."""


class BlockPool:
    """A fixed number of KV blocks: a refcount for each, and the queue of those that are free.

    The free queue is doubly linked: `allocate` takes from the head, `free` appends to the tail, `incref` unlinks a block
    from the middle; each in O(1) a block. Node `num_blocks` is the sentinel between both ends.

        sentinel ⇄ 4 ⇄ 0 ⇄ 2 ⇄ sentinel            allocate(1) → [4]        free([1]) → … ⇄ 2 ⇄ 1 ⇄ sentinel

    free_order: the ids in the order in which they are first handed out; ascending when None.
    Raises ValueError unless num_blocks and block_size are whole numbers of at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int, free_order: Sequence[int] | None = None) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1.")
        order = list(range(num_blocks)) if free_order is None else list(free_order)
        if sorted(order) != list(range(num_blocks)):
            raise ValueError(f"free_order must name each block 0 … {num_blocks - 1} once.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = 0
        self._refcounts = [0] * num_blocks
        self._next = [num_blocks] * (num_blocks + 1)
        self._prev = [num_blocks] * (num_blocks + 1)
        self._enqueue(order)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks from the head of the free queue, each with refcount 1. All or nothing.

        Raises OutOfBlocks, and takes none, if fewer than `n` are free.
        """
        if n < 0:
            raise ValueError(f"n is {n}; it must be a whole number, at least 0.")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} of {self.num_blocks} are free.")
        taken, head = [], self._next[self.num_blocks]
        for _ in range(n):
            taken.append(head)
            self._refcounts[head] = 1
            head = self._next[head]
        self._next[self.num_blocks], self._prev[head] = head, self.num_blocks
        self.num_free -= n
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block. Those with refcount 0 join the tail of the free queue, in the order given.

        Raises BlockError, and frees none, for a block that is free already or that the pool doesn't have.
        """
        refcounts, released = self._refcounts, []
        for done, block in enumerate(blocks):
            if not 0 <= block < self.num_blocks or refcounts[block] == 0:
                for earlier in blocks[:done]:
                    refcounts[earlier] += 1
                raise BlockError(self._why_not(block, "freed"))
            refcounts[block] -= 1
            if refcounts[block] == 0:
                released.append(block)
        self._enqueue(released)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block that is in use. Raises BlockError, and adds none, if one is free."""
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._refcounts[block] == 0:
                raise BlockError(self._why_not(block, "shared"))
        for block in blocks:
            self._refcounts[block] += 1

    def incref(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, free or in use. A free one is unlinked from the free queue.

        For a prefix cache: a freed block keeps its KV until it is allocated again, so that a hit can take it back.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise BlockError(self._why_not(block, "referenced"))
        for block in blocks:
            if self._refcounts[block] == 0:
                before, after = self._prev[block], self._next[block]
                self._next[before], self._prev[after] = after, before
                self.num_free -= 1
            self._refcounts[block] += 1

    def refcount(self, block: int) -> int:
        """Number of tables that list the block; 0 when free. Raises BlockError for a block that the pool doesn't have."""
        if not 0 <= block < self.num_blocks:
            raise BlockError(self._why_not(block, "asked for"))
        return self._refcounts[block]

    def is_writable(self, block: int) -> bool:
        """True if the block has exactly one owner, so that no other sequence sees a write."""
        return self.refcount(block) == 1

    def free_blocks(self) -> Iterator[int]:
        """The free blocks, in the order in which they will be allocated."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def _enqueue(self, blocks: Sequence[int]) -> None:
        tail = self._prev[self.num_blocks]
        for block in blocks:
            self._next[tail], self._prev[block] = block, tail
            tail = block
        self._next[tail], self._prev[self.num_blocks] = self.num_blocks, tail
        self.num_free += len(blocks)

    def _why_not(self, block: int, verb: str) -> str:
        if not 0 <= block < self.num_blocks:
            return f"block {block} can't be {verb}: the pool has blocks 0 … {self.num_blocks - 1}."
        return f"block {block} can't be {verb}: it is free, no table owns it."


class BlockTable:
    """The blocks of one sequence, in logical order, and how many tokens they hold.

    It owns one reference on every block it lists. `free()` drops them, last block first, so that in the prefix cache the
    head of a text is evicted after its tail.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0

    def blocks_needed(self, n: int) -> int:
        """Free blocks that the next `append(n)` takes, the block for a copy-on-write included."""
        missing = -(-(self.num_tokens + n) // self.pool.block_size) - len(self.blocks)
        return missing + (n > 0 and self._tail_is_shared())

    def append(self, n: int) -> list[int]:
        """Make room for `n` more tokens and return their slots, shape [n].

        All or nothing: raises OutOfBlocks and changes nothing if the pool has too few free blocks. Raises BlockError if
        the first token would be written into a shared block: call `copy_on_write` first.
        """
        if n < 0:
            raise ValueError(f"n is {n}; it must be a whole number, at least 0.")
        if n > 0 and self._tail_is_shared():
            raise BlockError(f"block {self.blocks[-1]} is shared; take a copy with copy_on_write() before writing.")
        start, stop = self.num_tokens, self.num_tokens + n
        missing = -(-stop // self.pool.block_size) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.allocate(missing)
        self.num_tokens = stop
        return self.slot_mapping(start, stop)

    def attach_prefix(self, blocks: Sequence[int]) -> None:
        """Begin an empty table with the full blocks of a cached prefix, and add a reference to each."""
        if self.blocks:
            raise BlockError(f"a table of {len(self.blocks)} blocks can't take a prefix; only an empty one can.")
        self.pool.incref(blocks)
        self.blocks = list(blocks)
        self.num_tokens = len(blocks) * self.pool.block_size

    def slot_mapping(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Slots of tokens start … stop - 1, shape [stop - start]. slot = physical block * block_size + offset."""
        stop = self.num_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start} … {stop} asked for; the table holds 0 … {self.num_tokens}.")
        size, blocks = self.pool.block_size, self.blocks
        return [blocks[i // size] * size + i % size for i in range(start, stop)]

    def fork(self) -> BlockTable:
        """A second table over the same blocks: nothing is copied, each refcount grows by one."""
        child = BlockTable(self.pool)
        self.pool.share(self.blocks)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        return child

    def copy_on_write(self) -> tuple[int, int] | None:
        """Make the half-filled last block this table's own, so that the next token may be written into it.

        Returns None if no copy is needed: the last block is full, or has one owner. Otherwise replaces it with a fresh
        block and returns (src, dst), the KV copy that is still to be made, before anything is written. Raises OutOfBlocks
        and changes nothing if no block is free.
        """
        if not self._tail_is_shared():
            return None
        shared = self.blocks[-1]
        self.blocks += self.pool.allocate(1)  # listed before the shared block is dropped: a failure in between leaks none
        self.pool.free([shared])
        del self.blocks[-2]
        return shared, self.blocks[-1]

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens from `num_tokens` on, and free the blocks that only they used."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}; the table holds {self.num_tokens}, it must be 0 … that.")
        kept = -(-num_tokens // self.pool.block_size)
        self.pool.free(self.blocks[kept:][::-1])
        del self.blocks[kept:]
        self.num_tokens = num_tokens

    def free(self) -> None:
        """Free every block, last block first."""
        self.truncate(0)

    def _tail_is_shared(self) -> bool:
        return self.num_tokens % self.pool.block_size != 0 and not self.pool.is_writable(self.blocks[-1])
