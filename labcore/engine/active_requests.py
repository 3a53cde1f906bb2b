"""Active requests: maps request ids to groups, and sequence ids to requests.

    "r"            one caller's request      groups["r"]         its group
    "r/0", "r/1"   its sequences             requests["r/0"]     the sequence
                                             owners["r/0"]       its group, the one of "r"

With one sequence, "r" names both. A beam search forks new sequences as it goes on, so all names "r/…" are its own.
"""

from __future__ import annotations

from labcore.engine.completions import CompletionGroup
from labcore.engine.request_group import RequestGroup, sequence_ids
from labcore.request import Request
from labcore.sampling_params import BeamSearchParams, SamplingParams


class ActiveRequests:
    """groups: by request id, in order of arrival. requests, owners: by sequence id."""

    def __init__(self) -> None:
        self.groups: dict[str, RequestGroup] = {}
        self.requests: dict[str, Request] = {}
        self.owners: dict[str, RequestGroup] = {}

    def add(self, request: Request, group: RequestGroup) -> None:
        """Add a sequence of `group`."""
        self.requests[request.request_id] = request
        self.owners[request.request_id] = group

    def remove(self, request: Request) -> None:
        """Remove a sequence, if it is there. Its id may be used again."""
        self.requests.pop(request.request_id, None)
        self.owners.pop(request.request_id, None)

    def group(self, request_id: str) -> RequestGroup:
        """The group of a request id. Raises ValueError if there is none, or none any more."""
        group = self.groups.get(request_id) if isinstance(request_id, str) else None
        if group is None and isinstance(request_id, str) and request_id in self.owners:
            owner = self.owners[request_id].request_id
            raise ValueError(f"request_id {request_id!r} is one of the sequences of {owner!r}; name that request.")
        if group is None:
            raise self._not_served(request_id)
        return group

    def forkable(self, request_id: str) -> tuple[CompletionGroup, Request]:
        """The one sequence that an id names, with its group. Raises ValueError if it can't be forked."""
        if not isinstance(request_id, str) or not (request_id in self.owners or request_id in self.groups):
            raise self._not_served(request_id)
        group = self.owners.get(request_id) or self.groups[request_id]
        if not group.can_fork:
            raise ValueError(f"request_id {request_id!r} is a beam search, which forks its beams itself; fork a sampled one.")
        if request_id not in self.requests:
            names = ", ".join(repr(request.request_id) for request in group.requests)
            raise ValueError(f"request_id {request_id!r} stands for several continuations; fork one of them: {names}.")
        return group, self.requests[request_id]

    def check_unused(self, field: str, request_id: str, params: SamplingParams | BeamSearchParams) -> None:
        """Raises ValueError, with the name of the field, if the request needs an id that is in use."""
        taken = self._name_in_use(request_id, params)
        if taken is not None:
            raise ValueError(f"{field} {taken!r} is in use; give each unfinished request an id of its own.")

    def _name_in_use(self, request_id: str, params: SamplingParams | BeamSearchParams) -> str | None:
        """An id that the request needs and another one has. "r" with n = 2 needs "r/0" and "r/1", a search needs all "r/…"."""
        for name in [request_id] if params.is_search else [request_id, *sequence_ids(request_id, params.n)]:
            if name in self.groups or name in self.requests:
                return name
        above = [request_id[:i] for i, letter in enumerate(request_id) if letter == "/"]
        below = [name for name in self.groups if name.startswith(f"{request_id}/")] if params.is_search else []
        owning = [name for name in above if name in self.groups and not self.groups[name].can_fork]
        return next(iter([*owning, *below]), None)

    def _not_served(self, request_id: object) -> ValueError:
        return ValueError(f"request_id {request_id!r} is not being served; {len(self.groups)} requests are.")
