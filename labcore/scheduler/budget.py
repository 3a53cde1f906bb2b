"""The adaptive token budget: how many tokens a step may compute, from the duration of earlier steps.

This is `max_num_batched_tokens="auto"`.

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

    target     seconds that a step may take; the time between two tokens of a decoding request
    smallest   tokens that prompts get in any case: a target that can't be met must not starve them
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
        """Budget of the next step: what was found, but at least a token for each running request and `smallest` for prompts."""
        return max(self.found, num_running + self.smallest)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of `num_tokens` tokens that took `seconds`.

        A step below the budget says nothing about a larger one, unless it was too slow itself. One outlier, such as a step
        with a compilation in it, at most halves or doubles the budget.
        """
        if num_tokens < self.found and seconds <= self.target:
            return
        within_target = num_tokens * self.target / seconds if seconds > 0 else self.largest
        within_target = min(max(within_target, self.found / 2), self.found * 2)
        self.found = min(max(int(within_target), self.smallest), self.largest)
