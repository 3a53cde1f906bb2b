"""The plan of one step, as plain data: what the scheduler hands to the model runner. Built in notebook 04."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SchedulerOutput:
    """The plan of one step, as plain data.

    The order within a step is fixed: swaps in, block copies, forward, sample.

    num_scheduled_tokens   request id → tokens to compute, in batch order
    siblings               request id → ids of the requests that sample from the same row of logits: its prompt is theirs
    block_copies           (src, dst) blocks to copy before anything is written
    swaps_in, swaps_out    (host block, device block) and (device block, host block)
    preempted              ids of requests that were sent back to the waiting queue
    """

    step: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    siblings: dict[str, list[str]] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes in all."""
        return sum(self.num_scheduled_tokens.values())
