"""The planted defect of a bug hunt. Built in notebook 05."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from labcore.kvcache.prefix import PrefixCache, block_key
from labcore.request import Request


class LazyPrefixCache(PrefixCache):
    """A prefix cache with as little to do as possible, and a defect that real engines have had.

    where   key → the block that was registered under it
    holds   block → the key of what is in it
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.where: dict[bytes, int] = {}
        self.holds: dict[int, bytes] = {}

    def match(self, request: Request) -> list[int]:
        found = []
        for key in self.keys(request, (request.num_tokens - 1) // self.block_size):
            block = self.where.get(key)
            if block is None or self.holds.get(block) != key:  # handed out since, and filled with something else
                break
            found.append(block)
        return found

    def cache_full_blocks(self, request: Request) -> None:
        keys = self.keys(request, request.num_computed_tokens // self.block_size)
        for block, key in zip(request.table.blocks, keys, strict=False):
            if self.holds.get(self.where.get(key)) != key:
                self.where[key], self.holds[block] = block, key

    def evict(self, blocks: Sequence[int]) -> None:
        """Nothing to do: whoever gets a block writes its own key over the old one in time."""

    def keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """The chained keys of the request's first blocks."""
        keys, size = [b""], self.block_size
        for i in range(num_blocks):
            content = array("I", request.token_ids(i * size, (i + 1) * size))
            keys.append(block_key(keys[-1], content.tobytes()))
        return keys[1:]
