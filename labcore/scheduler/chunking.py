"""Chunking: how many of a request's tokens a step computes, whole prompts or chunks of them.

Built in notebooks 04 and 06.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from labcore.request import Request


class ChunkPolicy(ABC):
    """Decides how many of a request's uncomputed tokens go into the step that is being planned."""

    def begin_step(self) -> None:  # noqa: B027 — a policy that counts nothing has nothing to do here
        """A new step is being planned: reset what was counted in the last one."""

    @abstractmethod
    def num_tokens(self, request: Request, budget_left: int, budget: int) -> int:
        """Tokens to compute now, 0 … min(uncomputed, budget_left); 0 lets the request wait for a later step.

        budget is the whole step's token budget, budget_left what other requests have left of it.
        """


class WholePrompts(ChunkPolicy):
    """A prompt is computed in one step, and waits for a step with room for it.

    A prompt so long that decoding requests alone could starve it is cut: it takes what a step has left.

    max_num_seqs: most requests that run at once, each of which can take a token from the budget.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs

    def num_tokens(self, request: Request, budget_left: int, budget: int) -> int:
        wanted = request.num_uncomputed_tokens
        if wanted <= budget_left:
            return wanted
        fits_later = wanted <= budget - self.max_num_seqs
        return 0 if fits_later else budget_left


class ChunkedPrefill(ChunkPolicy):
    """A prompt is computed in chunks: each step gives it what the other requests leave of the budget.

    max_partial_prefills   prompts that one step may leave unfinished; further ones wait, and those behind them
    long_prefill_threshold most tokens of one prompt in a step, so that shorter prompts overtake it; 0: no limit
    Source: Sarathi-Serve (Agrawal et al. 2024), chunked prefills and stall-free batching.
    """

    def __init__(self, max_partial_prefills: int = 4, long_prefill_threshold: int = 0) -> None:
        self.max_partial_prefills = max_partial_prefills
        self.long_prefill_threshold = long_prefill_threshold
        self._num_partial = 0

    def begin_step(self) -> None:
        self._num_partial = 0

    def num_tokens(self, request: Request, budget_left: int, budget: int) -> int:
        n = min(request.num_uncomputed_tokens, budget_left, self.long_prefill_threshold or budget_left)
        if n == request.num_uncomputed_tokens:
            return n
        if self._num_partial == self.max_partial_prefills:
            return 0
        self._num_partial += n > 0
        return n
