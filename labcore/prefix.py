"""The prefix cache's seam: what the scheduler asks of it. The cache that finds something comes with notebook 05."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from labcore.request import Request


class PrefixCache(ABC):
    """Finds blocks whose KV was computed before. The scheduler tells it what is computed and what is overwritten."""

    @abstractmethod
    def match(self, request: Request) -> list[int]:
        """Full blocks that hold the KV of the request's first tokens, in logical order; never all of its tokens."""

    @abstractmethod
    def publish(self, request: Request) -> None:
        """The request's first `num_computed_tokens` tokens have their KV now; its full blocks may be found by others."""

    @abstractmethod
    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks were handed out again; what they held is gone."""


class NoPrefixCache(PrefixCache):
    """Finds nothing: every prompt is computed from its first token."""

    def match(self, request: Request) -> list[int]:
        return []

    def publish(self, request: Request) -> None:
        pass

    def forget(self, blocks: Sequence[int]) -> None:
        pass
