"""Preemption: what happens to the KV of a request that has to make room. Built in notebook 04.

Source: Kwon et al. 2023 (PagedAttention), section 4.5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from labcore.kvcache.manager import KVCacheManager
from labcore.request import Request, RequestStatus
from labcore.scheduler.plan import SchedulerOutput


class Preemption(ABC):
    """What happens to the KV of a preempted request."""

    @abstractmethod
    def preempt(self, request: Request, kv: KVCacheManager, plan: SchedulerOutput) -> None:
        """Take every device block from the request, so that a later step can resume it where it was."""


class Recompute(Preemption):
    """Free the blocks. The tokens stay, and are computed again when the request is admitted again."""

    def preempt(self, request: Request, kv: KVCacheManager, plan: SchedulerOutput) -> None:
        kv.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
