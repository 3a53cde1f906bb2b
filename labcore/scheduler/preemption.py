"""What becomes of the KV of a request that is preempted. Built in notebook 04.

Source: Kwon et al. 2023 (PagedAttention), section 4.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from labcore.request import Request, RequestStatus
from labcore.scheduler.plan import SchedulerOutput


class Preemption(ABC):
    """What becomes of the KV of a request that has to make room."""

    @abstractmethod
    def preempt(self, request: Request, plan: SchedulerOutput) -> None:
        """Take every device block from the request, so that a later step can bring it back where it was."""


class Recompute(Preemption):
    """Drop the KV; the tokens stay, and are computed again when the request's turn comes."""

    def preempt(self, request: Request, plan: SchedulerOutput) -> None:
        request.table.free()
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
