"""Faults of parts: which part it was, and what to do when a step can't be stopped any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from traceback import walk_tb


class Faults:
    """Keeps what parts raise while a step is completed, and says which part it was.

    parts   gives the parts by the names under which a caller plugs them in
    """

    def __init__(self, parts: Callable[[], Mapping[str, object]]) -> None:
        self._parts = parts
        self._first: BaseException | None = None

    def attempt(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a part. What it raises is kept: the step goes on, and the first error is raised when it is complete."""
        try:
            call(*arguments)
        except BaseException as error:
            self.keep(error)

    def keep(self, error: BaseException) -> None:
        self._first = self._first or error

    def raise_first(self) -> None:
        """Raise the first error that was kept, if there was one, and forget the others."""
        error, self._first = self._first, None
        if error is not None:
            raise error

    def name_part(self, error: Exception) -> None:
        """Add a note to the error that names the part it came out of. Before Python 3.11 there are no notes."""
        name = self.part_at_fault(error)
        if name is not None and hasattr(error, "add_note"):
            error.add_note(f"raised by the engine's {name}, {type(self._parts()[name]).__name__}")

    def describe(self, error: BaseException) -> str:
        """The error in one line, with the part."""
        name = self.part_at_fault(error)
        where = "" if name is None else f"{name}: "
        return " ".join(f"{where}{type(error).__name__}: {error}".split())

    def part_at_fault(self, error: BaseException) -> str | None:
        """The name of the part whose method raised the error: the innermost that is on its way. None if none is."""
        parts = self._parts()
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            owner = frame.f_locals.get("self")
            for name, part in parts.items():
                if part is not None and owner is part:
                    return name
        return None
