"""The architecture: imports go one way, names are unique, the top level holds what callers touch."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import labcore

ROOT = Path(labcore.__file__).parent
TESTS = Path(__file__).parent

TOP_LEVEL = {"__init__", "config", "llm", "outputs", "request", "sampling_params"}
FLOORS = (  # a room imports from those above it in this list, and from no other
    ("config", "sampling_params", "outputs", "files"),
    ("request", "setup"),
    ("models", "recorder"),
    ("kvcache",),
    ("scheduler", "attention", "sampling"),
    ("workload",),
    ("engine", "viz"),
    ("llm", "baseline"),
    ("doctor", "course", "bench"),
    ("cli",),
)
LIBRARY_TO_PACKAGE = {"labcore"}  # `import labcore` inside labcore: the version, and the public names


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, parsed."""
    files = sorted(ROOT.rglob("*.py"))
    return {".".join(("labcore", *f.relative_to(ROOT).with_suffix("").parts)): ast.parse(f.read_text("utf-8")) for f in files}


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of labcore that a module imports when it runs; imports for type checkers do not count."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "labcore":
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "labcore"}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_imports_of_rooms_go_one_way():
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    trees = modules()
    upward = [
        f"{module} imports {imported}"
        for module, tree in trees.items()
        for imported in sorted(imports(tree, set(trees)))
        if room(imported) not in (room(module), "labcore") and floor[room(imported)] >= floor[room(module)]
    ]
    assert upward == []
    assert {room(module) for module in trees} - {"__init__"} == set(floor)


def test_imports_of_modules_form_no_circle():
    trees = {name.removesuffix(".__init__"): tree for name, tree in modules().items()}
    graph = {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_names_of_modules_are_unique():
    names = Counter(name.rpartition(".")[2] for name in modules())
    assert [name for name, count in names.items() if count > 1 and not name.startswith("__")] == []


def test_names_of_classes_are_unique():
    names = Counter(node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_top_level_holds_what_callers_touch():
    assert {file.stem for file in ROOT.glob("*.py")} == TOP_LEVEL


def test_tests_mirror_the_package():
    rooms = {folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    mirrored = {folder.name for folder in TESTS.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert mirrored - rooms == {"support"}
    assert rooms - mirrored == set()


def test_private_names_stay_in_their_module():
    trees = modules()
    borrowed = [
        f"{module} imports {node.module}.{alias.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labcore")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert borrowed == []
