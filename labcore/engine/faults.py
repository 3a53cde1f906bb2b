"""Faults of pluggable parts: name the part at fault, and defer the error until the step is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from traceback import walk_tb


class Faults:
    """Defers the errors that parts raise while a step is completed, and names the part.

    parts   returns the parts by their names in `build_engine`
    """

    def __init__(self, parts: Callable[[], Mapping[str, object]]) -> None:
        self._parts = parts
        self._first: BaseException | None = None

    def attempt(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a part. An error is kept: the step goes on, and the first one is raised when it is complete."""
        try:
            call(*arguments)
        except BaseException as error:
            self.keep(error)

    def keep(self, error: BaseException) -> None:
        self._first = self._first or error

    def raise_first(self) -> None:
        """Raise the first error that was kept, if there is one, and drop the others."""
        error, self._first = self._first, None
        if error is not None:
            raise error

    def name_part(self, error: Exception) -> None:
        """Add a note that names the part at fault to the error. Python 3.10 has no notes."""
        name = self.part_at_fault(error)
        if name is not None and hasattr(error, "add_note"):
            part = self._parts()[name]
            kind = part if isinstance(part, type) else type(part)
            error.add_note(f"raised by the engine's {name}, {kind.__name__}")

    def describe(self, error: BaseException) -> str:
        """The error in one line, with the part."""
        name = self.part_at_fault(error)
        where = "" if name is None else f"{name}: "
        return " ".join(f"{where}{type(error).__name__}: {error}".split())

    def part_at_fault(self, error: BaseException) -> str | None:
        """The name of the innermost part whose method is in the traceback; None if there is none."""
        parts = self._parts()
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            owner = frame.f_locals.get("self")
            for name, part in parts.items():
                if part is not None and (owner is part or (isinstance(part, type) and isinstance(owner, part))):
                    return name
        return None
