"""Stand-ins: after a failed check the notebook goes on with the learner's class, and borrows only what the exercise asks for.

    class BlockPool                  allocate: the learner's       free: the learner's, not done yet
    class BlockPool(BlockPool)       free: borrowed                ← the stand-in, which `or_reference` returns
    class BlockPool(BlockPool)       free: the learner's, mended   ← the cell run again: the stand-in is emptied, and judged so

A method is borrowed from the version of the learner's own that passed last, or else from labcore's reference.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

BORROWED = "_borrowed_methods"
"""Attribute of a stand-in: the names of the methods that it has borrowed."""


def stand_in(cls: type, methods: Mapping[str, Any]) -> type:
    """A subclass of the learner's class, of the same name, with `methods` on top."""
    body = {**methods, BORROWED: set(methods), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), body)


def borrowed_methods(cls: type) -> set[str]:
    """Names of the methods that `cls` has from a stand-in, with none of the learner's own above it."""
    names: set[str] = set()
    for each in getattr(cls, "__mro__", ()):
        names |= {name for name in vars(each).get(BORROWED, ()) if definer(cls, name) is each}
    return names


def return_borrowed(cls: type, names: Iterable[str]) -> None:
    """Empty the stand-ins below `cls` of these methods, where the learner's own code defines them above.

    Before a check, so that `super()` can't reach what was borrowed, and a pass is a pass of the learner's code.
    """
    for each in getattr(cls, "__mro__", ()):
        for name in [name for name in names if name in vars(each).get(BORROWED, ()) and definer(cls, name) is not each]:
            delattr(each, name)
            vars(each)[BORROWED].remove(name)


def is_labcores(defined: Any) -> bool:
    """Whether a class or a function stands in a module of labcore, and so is not the learner's."""
    return defined.__module__.startswith("labcore.")


def definer(cls: type, name: str) -> type | None:
    """The class in the method resolution order that defines `name`."""
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def reference_methods(reference: type, names: tuple[str, ...]) -> dict[str, Any]:
    """The methods of that name, as labcore's reference defines them."""
    return {name: inspect.getattr_static(reference, name) for name in names}


def sources_of(obj: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Source of a learner's function, or of the named methods and what stands beside them in the same class statement.

    Empty if the source can't be had, or if any of it is not the learner's.
    """
    if isinstance(obj, FunctionType):
        functions: dict[str, Any] = {obj.__name__: obj}
    elif isinstance(obj, type) and names:
        owners = {definer(obj, name) for name in names}
        functions = {k: v for owner in owners if owner for k, v in vars(owner).items() if isinstance(v, FunctionType)}
    else:
        return {}
    if not set(names) <= set(functions) or any(map(is_labcores, functions.values())):
        return {}
    try:
        return {name: textwrap.dedent(inspect.getsource(function)) for name, function in functions.items()}
    except (OSError, TypeError):
        return {}


def function_from(source: str, name: str, namespace: dict[str, Any]) -> Callable:
    """The function that a saved source defines. namespace: the globals that it sees. Raises what the source raises."""
    made: dict[str, Any] = {}
    exec(_compiled(source, name), namespace, made)
    return made[name]


def methods_from(sources: Mapping[str, str], cls: type, namespace: dict[str, Any]) -> dict[str, Any]:
    """Methods from their saved sources, made in a class statement over `cls`, so that `super()` works."""
    body = textwrap.indent("\n".join(sources.values()), "    ")
    made: dict[str, Any] = {"_base": cls}
    exec(_compiled(f"class _kept(_base):\n{body}", cls.__name__), namespace, made)
    return {name: vars(made["_kept"])[name] for name in sources}


def namespace_of(obj: Any) -> dict[str, Any]:
    """Globals of the module that defines a learner's object: the notebook's."""
    return vars(sys.modules.get(getattr(obj, "__module__", None) or "__main__", sys.modules["__main__"]))


def _compiled(source: str, name: str) -> Any:
    return compile(source, f"<{name}, as it last passed>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
