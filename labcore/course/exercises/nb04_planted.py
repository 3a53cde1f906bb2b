"""The planted defect of a bug hunt. Built in notebook 04."""

from __future__ import annotations

from labcore.scheduler.plan import SchedulerOutput
from labcore.scheduler.scheduler import Scheduler


class CopyingScheduler(Scheduler):
    """A scheduler with a defect that real engines have had."""

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        for request in list(self.running):
            n = self.chunking.num_tokens(request, budget, self.max_num_batched_tokens)
            while request.table.blocks_needed(n) > self.kv.pool.num_free:
                self._preempt(self.running[-1], plan)
            if n > 0:
                self._reserve(request, n, plan)
                budget -= n
        return budget
