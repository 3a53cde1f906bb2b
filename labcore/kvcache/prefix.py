"""The prefix cache: full blocks, found again by the hash of their text. Built in notebook 05.

A block's hash covers its parent's hash and its own tokens, so that equal hashes mean equal text *from the start*:

    tokens     You are a hel │ pful assistant │ . What is pa │ ging?            block size 4, 3 full blocks
    hashes     h0 = h(t0)      h1 = h(h0, t1)   h2 = h(h1, t2)                  the rest has no hash yet

A finished request's blocks join the free queue with their KV, and stay findable there until they are allocated again. The
queue's order makes eviction least recently used first, and tails before heads, since a table frees its last block first.
A hash only says where to look: a block is a hit if it holds the very tokens, behind the very parent. So two texts with
one hash never read each other's KV.

Source: vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al. 2023) does the same with a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from labcore.request import Request


class PrefixCache(ABC):
    """Finds blocks whose KV was computed before.

    The KV cache manager tells it which blocks are full and computed, and which are about to be overwritten.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def match(self, request: Request) -> list[int]:
        """Full blocks that hold the KV of the request's first tokens, in logical order; never all of its tokens."""

    @abstractmethod
    def cache_full_blocks(self, request: Request) -> None:
        """Register the full blocks of the request's first `num_computed_tokens` tokens, whose KV is written."""

    @abstractmethod
    def evict(self, blocks: Sequence[int]) -> None:
        """These blocks are allocated again, or not to be trusted: no match returns them any more."""

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which a block is registered, None if it is not. For the flight recorder."""
        return None


class NoPrefixCache(PrefixCache):
    """Finds nothing: every prompt is computed from its first token."""

    def match(self, request: Request) -> list[int]:
        return []

    def cache_full_blocks(self, request: Request) -> None:
        pass

    def evict(self, blocks: Sequence[int]) -> None:
        pass


def block_key(parent: bytes, content: bytes) -> bytes:
    """Chained hash of a block, 16 bytes. It depends on the text alone: the same in every process and on every machine."""
    return blake2b(parent + content, digest_size=16).digest()


@dataclass(eq=False)
class CachedBlock:
    """The tokens in `content`, computed behind those of `parent`, and the blocks that hold their KV.

    parent   the block before it in its text, None at the start
    depth    number of blocks before it
    blocks   one, or several if requests computed the same text side by side; oldest first, as keys of a dict
    """

    key: bytes
    content: bytes
    parent: CachedBlock | None
    depth: int
    blocks: dict[int, None] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """The block that a match returns: the newest, which the free queue is likely to evict last."""
        return next(reversed(self.blocks))


class HashedPrefixCache(PrefixCache):
    """Full blocks under a chained hash of their tokens.

    block_size   tokens a block
    key_of       hash of (parent's hash, content); tests use one of 3 bits to make collisions common
    """

    def __init__(self, block_size: int, key_of: Callable[[bytes, bytes], bytes] = block_key) -> None:
        super().__init__(block_size)
        self.key_of = key_of
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._last_request: Request | None = None
        self._last_chain: list[CachedBlock] = []
        self._last_blocks: list[int] = []

    def __len__(self) -> int:
        """Texts that are registered; equal blocks count once."""
        return len(self._by_key)

    def match(self, request: Request) -> list[int]:
        """See `PrefixCache.match`. A block is hashed once a request, and looked up once while the request waits."""
        if not request.use_prefix_cache:
            return []
        chain, blocks = self._resume(request)
        for key, content in self._block_hashes(request, (request.num_tokens - 1) // self.block_size)[len(chain) :]:
            found = self._find(key, content, parent=chain[-1] if chain else None)
            if found is None:
                break
            chain.append(found)
            blocks.append(found.block)
        request.cached_chain = list(chain)
        return list(blocks)

    def cache_full_blocks(self, request: Request) -> None:
        """See `PrefixCache.cache_full_blocks`. Equal blocks share a hash, found until the last is evicted."""
        chain, full = request.cached_chain, request.num_computed_tokens // self.block_size
        if full <= len(chain) or not request.use_prefix_cache:
            return
        hashes = self._block_hashes(request, full)
        for i in range(len(chain), full):
            key, content = hashes[i]
            parent = chain[-1] if chain else None
            cached = self._find(key, content, parent) or self._remember(CachedBlock(key, content, parent, depth=i))
            cached.blocks[request.table.blocks[i]] = None
            self._by_block[request.table.blocks[i]] = cached
            self._correct_last_match(cached)
            chain.append(cached)

    def evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            cached = self._by_block.pop(block, None)
            if cached is None:
                continue
            del cached.blocks[block]
            if not cached.blocks:
                del self._by_key[cached.key]
            self._correct_last_match(cached)

    def hash_of(self, block: int) -> bytes | None:
        cached = self._by_block.get(block)
        return None if cached is None else cached.key

    def _find(self, key: bytes, content: bytes, parent: CachedBlock | None) -> CachedBlock | None:
        """The block under this hash, if it holds these very tokens, computed behind this very parent."""
        found = self._by_key.get(key)
        if found is None or found.content != content or found.parent is not parent:
            return None
        return found

    def _resume(self, request: Request) -> tuple[list[CachedBlock], list[int]]:
        """What the last match of this request found and is still cached. Empty if another request was matched last.

        The head of the waiting queue is matched in every step until it is admitted, mostly with the same result.
        """
        if request is not self._last_request:
            self._last_request, self._last_chain, self._last_blocks = request, [], []
        return self._last_chain, self._last_blocks

    def _correct_last_match(self, changed: CachedBlock) -> None:
        """Blocks of `changed` were registered or evicted: the last match takes the newest, or ends there if none is left."""
        depth, chain = changed.depth, self._last_chain
        if depth < len(chain) and chain[depth] is changed:
            if changed.blocks:
                self._last_blocks[depth] = changed.block
            else:
                del chain[depth:], self._last_blocks[depth:]

    def _remember(self, cached: CachedBlock) -> CachedBlock:
        rival = self._by_key.get(cached.key)
        if rival is not None:  # another text with the same hash, or one whose parent was evicted: the newer one stays
            self.evict(list(rival.blocks))
        self._by_key[cached.key] = cached
        return cached

    def _block_hashes(self, request: Request, num_blocks: int) -> list[tuple[bytes, bytes]]:
        """(hash, content) of the request's first full blocks; content: tokens as 32-bit words, in block 0 with the salt."""
        known = request.block_hashes
        if len(known) < num_blocks:
            start = len(known) * self.block_size
            words = array("I", request.token_ids(start, num_blocks * self.block_size)).tobytes()
            width = self.block_size * array("I").itemsize
            key = known[-1][0] if known else b""
            for offset in range(0, len(words), width):
                content = words[offset : offset + width]
                if not known:
                    content += request.cache_salt.encode()
                key = self.key_of(key, content)
                known.append((key, content))
        return known[:num_blocks] if len(known) > num_blocks else known
