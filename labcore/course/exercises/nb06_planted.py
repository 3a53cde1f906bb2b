"""The planted defect of a bug hunt. Built in notebook 06."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from labcore.request import Request
from labcore.scheduler.plan import SchedulerOutput

Event = tuple[str, int, str]


class EagerStream:
    """What the client reads, step by step, with a defect that real servers have had.

    spell      token ids → text
    num_sent   request → events sent so far; the bill is written from it
    """

    def __init__(self, spell: Callable[[list[int]], str]) -> None:
        self.spell = spell
        self.num_sent: Counter[str] = Counter()

    def after_step(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> list[Event]:
        """Events (request, token id, text) of a step that is over."""
        events = []
        for name in plan.num_scheduled_tokens:
            said = requests[name].output_token_ids
            events.append((name, said[-1], self.spell(said[-1:])) if said else (name, -1, ""))
            self.num_sent[name] += 1
        return events
