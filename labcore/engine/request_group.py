"""Request groups: the sequences that serve one caller's request, under the caller's `request_id`.

n completions are a group, and so are the beams of a search. The engine gives a group what was sampled for one of its
sequences; the group updates its tokens and texts, and says what that means for the scheduler. A group ends by itself, by
`abort`, or by `fail`: an error in one of its sequences ends all of them, and no sequence of another group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from labcore.outputs import RequestOutput
from labcore.request import Request


@dataclass
class GroupUpdate:
    """What the engine has to do, in this order; the group's own tokens and texts are updated already.

    advanced   sequences that gained a token, their last one; forked ones are among them
    finished   sequences that compute no more: their slots and blocks are free for the forked ones
    forked     (child, parent): the child is new, and shares the blocks that the parent holds now
    """

    advanced: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    forked: list[tuple[Request, Request]] = field(default_factory=list)


class RequestGroup(ABC):
    """request_id: the caller's name for it. requests: its unfinished sequences. error: why it failed, if it did.

    now: seconds on the engine's clock, for metrics.
    """

    num_candidates: int = 0
    """What `on_sampled` takes: 0 for one sampled token, else so many top (token id, log-probability)."""

    can_fork: ClassVar[bool] = True
    """Whether a caller may fork its sequences."""

    request_id: str
    requests: list[Request]
    error: str | None = None

    @property
    def finished(self) -> bool:
        return not self.requests

    def abort(self, now: float) -> list[Request]:
        """Finish all sequences as they are, with finish_reason "abort", and return them.

        If it raises what the tokenizer raises, nothing is finished, and the group must be failed.
        """
        return self._end("abort", now)

    def fail(self, error: str, now: float) -> list[Request]:
        """Finish all sequences as they are, with finish_reason "error". The tokenizer is not called again."""
        self.error = error
        return self._end("error", now)

    @abstractmethod
    def on_sampled(self, request: Request, sampled: Any, now: float) -> GroupUpdate:
        """Update with what was sampled for one of the sequences. If it raises, the group must be failed."""

    @abstractmethod
    def output(self) -> RequestOutput:
        """The output so far: a snapshot that later steps don't change. May raise what the tokenizer raises."""

    @abstractmethod
    def _end(self, reason: str, now: float) -> list[Request]:
        """Give every unfinished sequence its finish reason, drop it, and return them all."""


def sequence_ids(request_id: str, n: int) -> list[str]:
    """Ids of the n sequences of a group: "r" if there is one, else "r/0", "r/1", …"""
    return [request_id] if n == 1 else [f"{request_id}/{k}" for k in range(n)]
