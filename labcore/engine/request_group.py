"""A group: the requests that serve what one caller asked for, under the caller's `request_id`.

n continuations are a group, and so are the beams of a search. The engine gives a group what was drawn for one of its
requests; the group takes it in and says what that means for the requests as such. A group ends by itself, by `abort`, or
by `fail`: what goes wrong with one of its requests ends all of them, and no request of another group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from labcore.outputs import RequestOutput
from labcore.request import Request


@dataclass
class Change:
    """What the engine has to do, in this order; the groups have changed tokens and texts already.

    grown   requests that gained a token, their last one; forks are among them
    ended   requests that compute no more: their slots and blocks are free for the forks
    forks   (child, parent): the child is new, and begins with the blocks that the parent holds now
    """

    grown: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    forks: list[tuple[Request, Request]] = field(default_factory=list)


class Group(ABC):
    """request_id: the caller's name for it. requests: those that are still computed. error: why it failed, if it did.

    now: seconds on the engine's clock, for metrics.
    """

    request_id: str
    requests: list[Request]
    error: str | None = None

    @property
    def finished(self) -> bool:
        return not self.requests

    def abort(self, now: float) -> list[Request]:
        """End everything as it stands, with finish_reason "abort". Returns the requests that were still computed.

        If it raises what the tokenizer raises, nothing has ended, and the group must be failed.
        """
        return self._end("abort", now)

    def fail(self, error: str, now: float) -> list[Request]:
        """End everything as it stands, with finish_reason "error", and never ask the tokenizer again."""
        self.error = error
        return self._end("error", now)

    @abstractmethod
    def take(self, request: Request, drawn: Any, now: float) -> Change:
        """What was drawn for one of the requests. If it raises, the group must be failed."""

    @abstractmethod
    def output(self) -> RequestOutput:
        """What there is so far: a snapshot that later steps leave alone. May raise what the tokenizer raises."""

    @abstractmethod
    def _end(self, reason: str, now: float) -> list[Request]:
        """Give every request that is still computed its finish reason, let go of them, and return them."""
