"""A group: the requests that serve what one caller asked for, under the caller's `request_id`.

n continuations are a group, and so are the beams of a search. The engine gives a group what was drawn for one of its
requests; the group takes it in and says what that means for the requests as such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from labcore.outputs import RequestOutput
from labcore.request import Request


@dataclass
class Change:
    """What the engine has to do, in this order; the groups have changed tokens and texts already.

    forks   (child, parent): the child is new, and begins with the blocks that the parent holds now
    grown   requests that gained a token, their last one
    ended   requests that compute no more
    """

    forks: list[tuple[Request, Request]] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


class Group(ABC):
    """request_id: the caller's name for it. requests: those that are still computed."""

    request_id: str
    requests: list[Request]

    @property
    def finished(self) -> bool:
        return not self.requests

    @abstractmethod
    def abort(self) -> list[Request]:
        """End everything as it stands, with finish_reason "abort". Returns the requests that were still computed."""

    @abstractmethod
    def output(self) -> RequestOutput:
        """What there is so far: a snapshot that later steps leave alone."""
