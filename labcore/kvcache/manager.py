"""The KV cache manager: allocation, eviction, copy-on-write, sharing and freeing have one owner. Built in notebook 04.

A block that the pool hands out may still be registered in the prefix cache, under a text that is about to be overwritten.
Only this module allocates for requests, so that every allocation evicts:

    match     waiting request → the blocks of its cached prefix
    attach    admit it with that prefix                            refcount + 1
    fits, reserve   slots for its next tokens                      copy-on-write, allocate, evict
    commit    the KV of those tokens is written                    full blocks are registered in the prefix cache
    share     a fork begins with all blocks of its parent          refcount + 1, no copy
    free      finished or preempted                                refcount - 1; a block stays findable until it is evicted

Sources: Kwon et al. 2023 (PagedAttention), sections 4.2 to 4.5; vLLM's KVCacheManager has the same task. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from labcore.kvcache.blocks import BlockPool, BlockTable
from labcore.kvcache.prefix import PrefixCache
from labcore.request import Request


class KVCacheManager:
    """Changes the block pool, the prefix cache and the requests' block tables together.

    pool           hands out blocks. Ask it what you like; change it through the manager only
    prefix_cache   finds blocks whose KV was computed before; a NoPrefixCache finds none
    block_table    class of the requests' tables, called with the pool
    prefix_cache_queries, prefix_cache_hits   prompt tokens of admitted requests, and those found in the cache
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, block_table: type[BlockTable] = BlockTable) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.block_table = block_table
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def open_table(self, request: Request) -> None:
        """Give the request an empty block table."""
        request.table = self.block_table(self.pool)
        request.num_computed_tokens = 0

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of a waiting request, in logical order. Takes no reference."""
        return self.prefix_cache.match(request)

    def blocks_missing(self, request: Request, cached: Sequence[int]) -> int:
        """Free blocks that a waiting request takes for all of its tokens, of which `cached` hold the first.

        A cached block with an owner is shared, and takes none. One without is in the free queue, and counts as taken. A
        table owns a text from its first block on, so the first block without an owner ends the count.
        """
        in_use = sum(1 for _ in takewhile(self.pool.refcount, cached))
        return -(-request.num_tokens // self.pool.block_size) - in_use

    def attach(self, request: Request, cached: Sequence[int]) -> None:
        """Begin the request's table with its cached prefix. A request that was preempted is not counted again."""
        request.table.attach_prefix(cached)
        request.num_computed_tokens = request.table.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_cached_tokens

    def fits(self, request: Request, n: int) -> bool:
        """Whether the pool has enough free blocks to `reserve` the request's next `n` tokens."""
        pool = self.pool
        if n // pool.block_size + 2 <= pool.num_free:  # n tokens and a copy-on-write never take more
            return True
        return request.table.blocks_needed(n) <= pool.num_free

    def reserve(self, request: Request, n: int) -> tuple[int, int] | None:
        """Make room for the request's next `n` tokens. Returns the block copy (src, dst) that must come before the write.

        Raises OutOfBlocks if the pool has too few free blocks, see `fits`.
        """
        table = request.table
        copy = table.copy_on_write()
        if copy is not None:
            self.prefix_cache.evict(copy[1:])
        held = len(table.blocks)
        table.append(n)
        if len(table.blocks) > held:
            self.prefix_cache.evict(table.blocks[held:])
        return copy

    def commit(self, request: Request, n: int) -> None:
        """The KV of the request's next `n` tokens is written: register the blocks that are full now."""
        request.num_computed_tokens += n
        self.prefix_cache.cache_full_blocks(request)

    def share(self, child: Request, parent: Request) -> None:
        """The child begins with every block of the parent, the partly filled one too. Nothing is copied."""
        child.table = parent.table.fork()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        child.cached_chain = list(parent.cached_chain)
        child.block_hashes = parent.block_hashes[: len(parent.cached_chain)]

    def free(self, request: Request) -> None:
        """Give back every block of the request, last block first. What is registered stays findable until evicted."""
        request.table.free()

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks for no request: memory pressure on demand. Raises OutOfBlocks and takes none if fewer are free."""
        blocks = self.pool.allocate(n)
        self.prefix_cache.evict(blocks)
        return blocks

    def evict(self, blocks: Sequence[int] | None = None) -> None:
        """No later request finds these blocks; all blocks when None. They stay with their owners."""
        self.prefix_cache.evict(range(self.pool.num_blocks) if blocks is None else blocks)
