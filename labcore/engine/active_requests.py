"""The names of those who are being served, and what stands behind each.

    "r"            what one caller asked for            groups["r"]         the group that answers it
    "r/0", "r/1"   the sequences that are computed      requests["r/0"]     the sequence
                                                        owners["r/0"]       its group, the one of "r"

A caller with one continuation has one name for both.
"""

from __future__ import annotations

from labcore.engine.beams import BeamGroup
from labcore.engine.completions import CompletionGroup
from labcore.engine.request_group import Group
from labcore.request import Request
from labcore.sampling_params import BeamSearchParams, SamplingParams


class Registry:
    """Who is served. groups: by the caller's id, in order of arrival; requests and owners: by the sequence's."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.requests: dict[str, Request] = {}
        self.owners: dict[str, Group] = {}

    def enter(self, request: Request, group: Group) -> None:
        """A sequence is served from here on, for `group`."""
        self.requests[request.request_id] = request
        self.owners[request.request_id] = group

    def leave(self, request: Request) -> None:
        """It is served no more, if it ever was, and its name is free."""
        self.requests.pop(request.request_id, None)
        self.owners.pop(request.request_id, None)

    def group(self, request_id: str) -> Group:
        """What a caller asked for under this id. Raises ValueError if nothing that is still served."""
        group = self.groups.get(request_id) if isinstance(request_id, str) else None
        if group is None:
            raise self._not_served(request_id)
        return group

    def forkable(self, request_id: str) -> tuple[CompletionGroup, Request]:
        """The one sequence that an id names, with its group. Raises ValueError if no other can begin with its text."""
        if not isinstance(request_id, str) or not (request_id in self.owners or request_id in self.groups):
            raise self._not_served(request_id)
        group = self.owners.get(request_id) or self.groups[request_id]
        if isinstance(group, BeamGroup):
            raise ValueError(f"request_id {request_id!r} is a beam search, which forks its beams itself; fork a sampled one.")
        if request_id not in self.requests:
            names = ", ".join(repr(request.request_id) for request in group.requests)
            raise ValueError(f"request_id {request_id!r} stands for several continuations; fork one of them: {names}.")
        return group, self.requests[request_id]

    def check_unused(self, field: str, request_id: str, params: SamplingParams | BeamSearchParams) -> None:
        """Raises ValueError, with the name of the field, if the request needs a name that another one has."""
        taken = self._name_in_use(request_id, params)
        if taken is not None:
            raise ValueError(f"{field} {taken!r} is in use; give each unfinished request an id of its own.")

    def _name_in_use(self, request_id: str, params: SamplingParams | BeamSearchParams) -> str | None:
        """A name that the request needs and another one has. "r" with n = 2 needs "r/0" and "r/1", beams need all "r/…"."""
        searched = isinstance(params, BeamSearchParams)
        for name in [request_id] if searched else [request_id, *sequence_ids(request_id, params)]:
            if name in self.groups or name in self.requests:
                return name
        above = [request_id[:i] for i, letter in enumerate(request_id) if letter == "/"]
        below = [name for name in self.groups if name.startswith(f"{request_id}/")] if searched else []
        return next((n for n in [*above, *below] if n in below or isinstance(self.groups.get(n), BeamGroup)), None)

    def _not_served(self, request_id: object) -> ValueError:
        return ValueError(f"request_id {request_id!r} is not being served; {len(self.groups)} requests are.")


def sequence_ids(request_id: str, params: SamplingParams) -> list[str]:
    """Ids of the n sequences that serve a request: its own if there is one, else its own and their number."""
    return [request_id] if params.n == 1 else [f"{request_id}/{k}" for k in range(params.n)]
