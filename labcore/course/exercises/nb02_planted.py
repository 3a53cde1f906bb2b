"""The planted defect of a bug hunt. Built in notebook 02."""

from __future__ import annotations

from collections.abc import Sequence

from labcore.kvcache.blocks import BlockPool


class Beams:
    """A beam search whose blocks hold one token each, with a defect that a real engine has had.

    rows[k]: the blocks of beam k, one a token. Beams that come from the same beam share its blocks; each row is one
    owner of every block that it lists.
    """

    def __init__(self, pool: BlockPool, num_prompt_tokens: int, width: int) -> None:
        self.pool = pool
        prompt = pool.allocate(num_prompt_tokens)
        for _ in range(width - 1):
            pool.share(prompt)
        self.rows = [list(prompt) for _ in range(width)]

    def advance(self, parents: Sequence[int]) -> None:
        """One step: beam k goes on from beam parents[k], a token longer. A beam that nobody goes on from ends."""
        for beam, row in enumerate(self.rows):
            if parents.count(beam) == 0:
                self.pool.free(row)
            elif parents.count(beam) > 1:
                self.pool.share(row)
        self.rows = [self.rows[parent] + self.pool.allocate(1) for parent in parents]

    def finish(self) -> None:
        """All beams end."""
        for row in self.rows:
            self.pool.free(row)
        self.rows = []
