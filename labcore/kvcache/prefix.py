"""The prefix cache: full blocks that are found again by what they hold. Built in notebook 05.

A block's key is a hash of its parent's key and its own tokens, so that equal keys mean equal text *from the start*:

    tokens     You are a hel │ pful assistant │ . What is pa │ ging?            block size 4, 3 full blocks
    keys       k0 = h(t0)      k1 = h(k0, t1)   k2 = h(k1, t2)                  the rest has no key yet

A finished request's blocks go to the free queue with their content, and stay findable there until they are handed out
again; the queue's order makes that least recently used first, and tails before heads, since a table frees its last
block first. A key is only where to look. What is found must hold the very tokens, behind the very parent, so that two
texts with one hash can never read each other's KV.

Source: vLLM's automatic prefix caching; SGLang's RadixAttention (Zheng et al. 2023) does the same with a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from labcore.request import Request


class PrefixCache(ABC):
    """Finds blocks whose KV was computed before.

    The scheduler tells it what is computed, and what is about to be overwritten.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def match(self, request: Request) -> list[int]:
        """Full blocks that hold the KV of the request's first tokens, in logical order; never all of its tokens."""

    @abstractmethod
    def publish(self, request: Request) -> None:
        """The request's first `num_computed_tokens` tokens have their KV now; others may find its full blocks."""

    @abstractmethod
    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks were handed out again; what they held is gone."""

    def hash_of(self, block: int) -> bytes | None:
        """What a block can be found by, None if it can't be found. Only the flight recorder asks."""
        return None


class NoPrefixCache(PrefixCache):
    """Finds nothing: every prompt is computed from its first token."""

    def match(self, request: Request) -> list[int]:
        return []

    def publish(self, request: Request) -> None:
        pass

    def forget(self, blocks: Sequence[int]) -> None:
        pass


def block_key(parent: bytes, content: bytes) -> bytes:
    """16 bytes that depend on nothing but the text: the same in every process, on every machine, in every run."""
    return blake2b(parent + content, digest_size=16).digest()


@dataclass(eq=False)
class CachedBlock:
    """What a block holds: the tokens in `content`, computed behind those of `parent`.

    parent   the block before it in its text, None at the start
    """

    block: int
    key: bytes
    content: bytes
    parent: CachedBlock | None


class HashedPrefixCache(PrefixCache):
    """Full blocks keyed by a chained hash of their tokens.

    block_size   tokens a block
    key_of       hash of (parent key, content); tests use one of 3 bits to make collisions common
    """

    def __init__(self, block_size: int, key_of: Callable[[bytes, bytes], bytes] = block_key) -> None:
        super().__init__(block_size)
        self.key_of = key_of
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._by_key)

    def match(self, request: Request) -> list[int]:
        """See `PrefixCache.match`. O(blocks of the prompt), and the hashes are worked out once a request."""
        request.prefix_chain = []
        if not request.use_prefix_cache:
            return []
        parent = None
        for key, content in self._identities(request, (request.num_tokens - 1) // self.block_size):
            found = self._find(key, content, parent)
            if found is None:
                break
            request.prefix_chain.append(found)
            parent = found
        return [cached.block for cached in request.prefix_chain]

    def publish(self, request: Request) -> None:
        """See `PrefixCache.publish`. Of two equal blocks the first stays findable, the second is left to its owner."""
        chain, full = request.prefix_chain, request.num_computed_tokens // self.block_size
        if full <= len(chain) or not request.use_prefix_cache:
            return
        identities = self._identities(request, full)
        for i in range(len(chain), full):
            key, content = identities[i]
            parent = chain[-1] if chain else None
            known = self._find(key, content, parent)
            chain.append(known or self._remember(CachedBlock(request.table.blocks[i], key, content, parent)))

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            cached = self._by_block.pop(block, None)
            if cached is not None:
                del self._by_key[cached.key]

    def hash_of(self, block: int) -> bytes | None:
        cached = self._by_block.get(block)
        return None if cached is None else cached.key

    def _find(self, key: bytes, content: bytes, parent: CachedBlock | None) -> CachedBlock | None:
        """The block under this key, if it holds these very tokens, computed behind this very parent."""
        found = self._by_key.get(key)
        if found is None or found.content != content or found.parent is not parent:
            return None
        return found

    def _remember(self, cached: CachedBlock) -> CachedBlock:
        rival = self._by_key.get(cached.key)
        if rival is not None:  # another text with the same hash, or one whose parent is gone: the newer one stays
            del self._by_block[rival.block]
        self._by_key[cached.key] = self._by_block[cached.block] = cached
        return cached

    def _identities(self, request: Request, num_blocks: int) -> list[tuple[bytes, bytes]]:
        """(key, content) of the request's first full blocks; content: tokens as 32-bit words, once with the salt."""
        known = request.block_identities
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
