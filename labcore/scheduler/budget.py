"""How many tokens a step may compute, found from the steps that were: `max_num_batched_tokens="auto"`.

A step costs a fixed part, the weights that it reads, and a part for each token. A budget scaled by target / measured
walks along that line to the target, from below as from above, and doesn't overshoot:

    seconds                           ╱
    target ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄ 3╱┄┄        1  50 tokens took 0.65 of the target: try 50 / 0.65 = 76
                               2 ╱             2  76 took 0.83: 91
                         1   ╱                 3  91 took 0.94: 97, and so on to 100
                         ╱
                     ╱
    fixed  ┤     ╱
           └────────┴────────┴───────┴──→ tokens

Built in notebook 06. Source: Sarathi-Serve (Agrawal et al. 2024), a budget chosen for a time between tokens.
"""

from __future__ import annotations

import math


class AdaptiveBudget:
    """Finds the largest token budget whose steps keep a target time between tokens.

    target     seconds that a step may take; that is the time between two tokens of whoever decodes
    smallest   tokens that prompts get in any case, or a target that can't be met would stop them for ever
    largest    most tokens of a step
    Raises ValueError for a target that is not above 0, and unless 1 <= smallest <= largest.
    """

    def __init__(self, target: float, smallest: int = 16, largest: int = 2048) -> None:
        if not 0 < target < math.inf:
            raise ValueError(f"target is {target!r}; it must be a number of seconds above 0.")
        if not 1 <= smallest <= largest:
            raise ValueError(f"smallest is {smallest!r}; it must be from 1 to {largest!r}, the largest.")
        self.target = target
        self.smallest = smallest
        self.largest = largest
        self.found = smallest

    def tokens(self, num_running: int) -> int:
        """Budget of the next step: what was found, but a token for everybody who runs and `smallest` for prompts."""
        return max(self.found, num_running + self.smallest)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens took that long.

        A step below the budget says nothing about a larger one, unless it was too slow itself. One odd step, a compiler
        at work or a machine that was busy, at most halves or doubles the budget.
        """
        if num_tokens < self.found and seconds <= self.target:
            return
        affordable = num_tokens * self.target / seconds if seconds > 0 else self.largest
        affordable = min(max(affordable, self.found / 2), self.found * 2)
        self.found = min(max(int(affordable), self.smallest), self.largest)
