"""Whose code runs: which methods of a part are the learner's, which are labcore's, and how often the engine called them.

    calls of your BlockPool: allocate 41, free 36 · never called: refcount · labcore's: incref

Calls are counted with `sys.setprofile`, so that nothing is wrapped and an error shows the learner's own lines.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from labcore.course.learner.stand_in import borrowed_methods


def learners_methods(part: Any) -> dict[str, CodeType]:
    """The methods that the learner wrote, of a class or of an instance's class: name → code, the topmost of each name.

    One that is borrowed is not the learner's, whatever stub stands below it.
    """
    methods: dict[str, CodeType] = {}
    borrowed = borrowed_methods(class_of(part))
    for cls in class_of(part).__mro__:
        if cls.__module__.partition(".")[0] in ("labcore", "builtins", "abc"):
            continue
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) and name not in borrowed and not is_dunder(name):
                methods.setdefault(name, value.__code__)
    return methods


def labcores_methods(part: Any, base: type) -> list[str]:
    """Public methods of a part that are labcore's: inherited from `base`, or borrowed after a failed check."""
    own = learners_methods(part)
    public = [name for name, value in vars(base).items() if isinstance(value, FunctionType) and not name.startswith("_")]
    return [name for name in public if name not in own]


def class_of(part: Any) -> type:
    return part if isinstance(part, type) else type(part)


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@contextmanager
def counted(codes: Mapping[Hashable, CodeType]) -> Iterator[Counter[Hashable]]:
    """Count the calls of these functions that this thread makes inside the block. The counter is filled at its end."""
    calls: Counter[CodeType] = Counter()
    wanted, counts = set(codes.values()), Counter()
    entries: dict[CodeType, int] = {}

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code in wanted and frame.f_lasti == entries.setdefault(code, frame.f_lasti):
            calls[code] += 1  # elsewhere than at its entry a generator is resumed

    before: Callable | None = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        counts.update({name: calls[code] for name, code in codes.items() if calls[code]})


def report(name: str, counts: Mapping[str, int], labcores: list[str]) -> str:
    """One sentence on a part: which of the learner's methods ran, and how often, which did not, and what is labcore's.

    counts: calls of each of the learner's methods
    """
    ran = sorted((method for method in counts if counts[method]), key=lambda method: -counts[method])
    idle = [method for method in counts if not counts[method]]
    said = [f"calls of your {name}: {', '.join(f'{m} {counts[m]:,}' for m in ran)}" if ran else f"your {name} was never called"]
    said += [f"never called: {', '.join(idle)}"] if idle and ran else []
    said += [f"labcore's: {', '.join(labcores)}"] if labcores else []
    return " · ".join(said)
