"""Promotion: the notebooks' code and the package's code are identical, and a test checks it.

A code cell whose first line is `# labcore: kvcache.blocks.BlockPool.allocate` defines that symbol. The marked cells of all
notebooks are collected, merged (a class may be reopened cell by cell), and compared with the package as syntax trees:
only comments, docstrings and the order of methods may differ.
`labcore.course` explains how to write the cells.
"""

from __future__ import annotations

import ast
import copy
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from labcore.course.author.notebooks import calls, code_cells, parse_cell, read_notebook
from labcore.course.curriculum import LESSONS, Lesson, notebook_files

PACKAGE = Path(__file__).parents[2]
MARKER = re.compile(r"#\s*labcore:\s*(\S.*)")
BUILT_IN = re.compile(r"[Bb]uilt\s+in\s+notebooks?\s+\d\d(?:(?:,|\s+and|,\s+and)\s+\d\d)*")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign

# Public symbols, or whole modules, that no notebook builds, each with the reason.
KEPT_OUT: dict[str, str] = {
    "attention.backend": "the seam that kernels plug into, and the geometry of a step; notebook 03 uses both as they are",
    "attention.offline_compile.compile_gate": "a tool: the compile gate",
    "attention.transformers_hook": "the plug into transformers",
    "attention.offline_compile.cubin": "a tool: builds a launch and reads its machine code",
    "attention.sample_batch": "tensors to try a kernel on",
    "attention.select": "a table of names",
    "attention.offline_compile.gpus": "figures of NVIDIA's programming guide; notebook 03 builds programs_per_processor",
    "attention.kernels.tile_sizes": "a table with reasons, to be read",
    "attention.torch_backend": "the oracle that the kernels are held to",
    "attention.triton_backend": "picks kernel, tile and splits; notebook 03 builds choose_splits",
    "attention.kernels.launch": "arguments by name, long and plain",
    "attention.kernels.triton_mode": "interpreter or compiler: decided before the first kernel exists",
}


@dataclass
class Promoted:
    """One symbol as its notebook defines it: its first node and, for a class, the members of all its cells."""

    name: str  # "blocks.BlockPool"
    notebook: str  # "02"
    cell: int  # of its first cell, from 1
    node: Definition
    members: dict[str, ast.stmt] = field(default_factory=dict)
    cells: dict[str, int] = field(default_factory=dict)  # member → cell


@dataclass
class Report:
    """The result of `check-promotion`: owners, parts to come, and problems."""

    owned: dict[str, list[str]]  # notebook → the symbols it owns
    to_come: dict[str, tuple[str, ...]]  # notebook that isn't written yet → its parts
    problems: list[str]

    def __str__(self) -> str:
        rows = [f"{notebook:26} owns {', '.join(names) or 'nothing'}" for notebook, names in self.owned.items()]
        rows += [f"{notebook:26} to come: {', '.join(parts)}" for notebook, parts in self.to_come.items()]
        rows += [f"kept out                   {name}: {reason}" for name, reason in KEPT_OUT.items()]
        count = len(self.problems)
        rows += ["", *self.problems, "", f"{count} difference{'s' if count != 1 else ''}"] if count else ["all agree"]
        return "\n".join(rows)


def compare(folder: Path, package: Path = PACKAGE, lessons: tuple[Lesson, ...] = LESSONS) -> Report:
    """Compare the marked cells of the notebooks in `folder` with `package`, and find symbols without an owner."""
    promoted, problems = collect(folder)
    written = {path.stem for path in notebook_files(folder)}
    problems += [problem for symbol in promoted.values() for problem in differences(symbol, package)]
    problems += [
        p
        for lesson in lessons
        if lesson.notebook in written
        for part in lesson.parts
        for p in _gaps(part, lesson.number, promoted, package)
    ]
    problems += [
        f"{name} is kept out, but notebook {promoted[name].notebook} owns it." for name in KEPT_OUT if name in promoted
    ]
    owned = {stem: sorted(s.name for s in promoted.values() if s.notebook == stem[:2]) for stem in sorted(written)}
    to_come = {lesson.notebook: lesson.parts for lesson in lessons if lesson.notebook not in written}
    return Report(owned, to_come, problems)


def collect(folder: Path) -> tuple[dict[str, Promoted], list[str]]:
    """The promoted symbols of all notebooks in `folder` by name, and the problems of the cells themselves."""
    symbols: dict[str, Promoted] = {}
    problems: list[str] = []
    for path in notebook_files(folder):
        for number, cell in code_cells(read_notebook(path)):
            names = marked_names(cell.source)
            if names:
                where = f"notebook {path.stem[:2]}, cell {number}"
                problems += [
                    f"{where}: {text}" for text in _add_cell(symbols, path.stem[:2], number, names, cell.source)
                ]
    return symbols, problems


def marked_names(source: str) -> list[str]:
    """The symbols that the first line of a cell names; `.refcount` after `kvcache.blocks.BlockPool.share` is its sibling."""
    match = MARKER.fullmatch(source.split("\n", 1)[0].strip())
    names: list[str] = []
    for word in match[1].split(",") if match else ():
        word = word.strip()
        names.append(names[-1].rpartition(".")[0] + word if word.startswith(".") and names else word)
    return names


def differences(symbol: Promoted, package: Path) -> list[str]:
    """Differences between a promoted symbol and the package's, each as a few lines; empty if they agree."""
    module, _, name = symbol.name.rpartition(".")
    path = module.replace(".", "/") + ".py"
    file = package / path
    where = f"{symbol.name}   notebook {symbol.notebook}, cell {symbol.cell}, and labcore/{path}"
    if not file.is_file():
        return [f"{where}: there is no such module."]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = definitions(tree).get(name)
    if node is None:
        return [f"{where}: the module doesn't define it."]
    problems = []
    if symbol.notebook not in builders(ast.get_docstring(tree) or ""):
        problems.append(f'{where}: the module\'s docstring must say "Built in notebook {symbol.notebook}."')
    if not (isinstance(node, ast.ClassDef) and isinstance(symbol.node, ast.ClassDef)):
        return problems + _drift(where, symbol.node, node)
    problems += _drift(where, _header(symbol.node), _header(node))
    theirs = members(node)
    for member in [*theirs, *(m for m in symbol.members if m not in theirs)]:
        cell = symbol.cells.get(member, symbol.cell)
        where = f"{symbol.name}.{member}   notebook {symbol.notebook}, cell {cell}, and labcore/{path}"
        problems += _drift(where, symbol.members.get(member), theirs.get(member))
    return problems


def builders(docstring: str) -> set[str]:
    """The notebooks that a module's docstring names: {"04", "06"} of "Built in notebooks 04 and 06."."""
    return {number for match in BUILT_IN.finditer(docstring) for number in re.findall(r"\d\d", match[0])}


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """What a module (or a cell) defines at its top level, also inside `if` and `try`, by name.

    The line `BlockPool = or_reference("02.allocate", BlockPool)` of an exercise defines nothing.
    """
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(call is node.value for call in calls(node, "or_reference")):
            continue
        if isinstance(node, (ast.If, ast.Try)):
            branches = [node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))]
            for branch in branches:
                found = {**definitions(ast.Module(branch, [])), **found}
        else:
            found.update(dict.fromkeys(_bound_names(node), node))
    return found


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """The statements of a class body by the name that they bind; a second one of a name gets a number (`x`, `x 2`)."""
    found: dict[str, ast.stmt] = {}
    for statement in _without_docstrings(node).body:
        for name in _bound_names(statement) or [f"`{ast.unparse(statement)}`"]:
            copies = sum(1 for known in found if known.split(" ")[0] == name)
            found[name if not copies else f"{name} {copies + 1}"] = statement
    return found


def public_symbols(part: str, package: Path = PACKAGE) -> dict[str, Definition]:
    """The public definitions of a part's modules: {"kvcache.blocks.BlockPool": node}. Empty if there is no such module."""
    root = package / part.replace(".", "/")
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    symbols = {}
    for file in (file for file in files if file.is_file()):
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        for name, node in definitions(ast.parse(file.read_text(encoding="utf-8"))).items():
            if not name.startswith("_"):
                symbols[f"{module}.{name}"] = node
    return symbols


def _add_cell(symbols: dict[str, Promoted], notebook: str, number: int, names: list[str], source: str) -> list[str]:
    """Add the definitions of one marked cell to `symbols`; returns the cell's problems."""
    tree = parse_cell(source)
    if tree is None:
        return ["is marked for promotion, but isn't plain Python."]
    problems, defined = [], definitions(tree)
    classes = {name.rpartition(".")[0] for name in names if _is_member(name, defined)}
    for name in names:
        if _is_member(name, defined):
            continue
        node = defined.get(name.rpartition(".")[2])
        if node is None:
            problems.append(f"names {name}, but doesn't define it.")
        elif _reopens(node):
            problems.append(
                f"opens {name} again: name the methods that it adds, such as {name}.{next(iter(members(node)), 'x')}."
            )
        elif name in symbols:
            problems.append(
                f"defines {name} again; notebook {symbols[name].notebook}, cell {symbols[name].cell} has it."
            )
        else:
            inside = members(node) if isinstance(node, ast.ClassDef) else {}
            symbols[name] = Promoted(name, notebook, number, node, inside, dict.fromkeys(inside, number))
    for class_name in sorted(classes):
        added = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == class_name}
        problems += _add_members(symbols, notebook, number, class_name, added, defined[class_name.rpartition(".")[2]])
    named = {name.rpartition(".")[2] for name in (*names, *classes)}
    problems += [
        f"defines {name} without naming it in its first line."
        for name, node in defined.items()
        if name not in named and not _is_trial(node)
    ]
    return problems


def _add_members(
    symbols: dict[str, Promoted], notebook: str, number: int, name: str, added: set[str], node: Definition
) -> list[str]:
    symbol = symbols.get(name)
    if symbol is None or symbol.notebook != notebook:
        return [f"adds to {name}, but no earlier cell of this notebook begins it (`# labcore: {name}`)."]
    if not _reopens(node):
        return [f"adds to {name}, so its class line must be `class {node.name}({node.name}):`."]
    problems = []
    for member, statement in members(node).items():
        if member.split(" ")[0] not in added:
            problems.append(f"defines {name}.{member} without naming it in its first line.")
        elif member in symbol.members:
            problems.append(f"defines {name}.{member} again; cell {symbol.cells[member]} has it.")
        else:
            symbol.members[member], symbol.cells[member] = statement, number
    missing = added - {member.split(" ")[0] for member in members(node)}
    return problems + [f"names {name}.{member}, but doesn't define it." for member in sorted(missing)]


def _gaps(part: str, notebook: str, promoted: dict[str, Promoted], package: Path) -> list[str]:
    """What is missing from a part whose notebook is written: its module, its owner, or owners of public symbols."""
    symbols = public_symbols(part, package)
    if not symbols:
        return [f"{part}: notebook {notebook} is written, but labcore/{part.replace('.', '/')} has nothing in it."]
    if not any(symbol.notebook == notebook for name, symbol in promoted.items() if name in symbols):
        return [f"{part}: notebook {notebook} is written, but promotes nothing into it."]
    kept = {name for name in symbols if name in KEPT_OUT or name.rpartition(".")[0] in KEPT_OUT}
    return [
        f"{name} has no owner: promote it from a notebook, or give a reason in KEPT_OUT."
        for name in symbols
        if name not in promoted and name not in kept
    ]


def _is_member(name: str, defined: dict[str, Definition]) -> bool:
    """True for "kvcache.blocks.BlockPool.share" in a cell that opens BlockPool: the last word but one is its class."""
    owner = name.split(".")[-2] if "." in name else ""
    return isinstance(defined.get(owner), ast.ClassDef)


def _reopens(node: ast.AST) -> bool:
    """True for `class BlockPool(BlockPool):`."""
    return (
        isinstance(node, ast.ClassDef)
        and not node.decorator_list
        and not node.keywords
        and [ast.unparse(base) for base in node.bases] == [node.name]
    )


def _is_trial(node: ast.AST) -> bool:
    """True for `pool = BlockPool(4, 4)` below a definition: a lower-case name, assigned to try the code."""
    return isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(name.isupper() for name in _bound_names(node))


def _bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _header(node: ast.ClassDef) -> ast.ClassDef:
    header = copy.copy(node)
    header.body = []
    return header


def _without_docstrings(node: ast.AST) -> ast.AST:
    """A copy without docstrings, and without the `pass` or `...` that stands where one was."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if ast.get_docstring(inner, clean=False) is not None:
                del inner.body[0]
            inner.body = [s for s in inner.body if not isinstance(s, ast.Pass) and not _is_ellipsis(s)]
    return node


def _is_ellipsis(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and statement.value.value is ...
    )


def _drift(where: str, ours: ast.AST | None, theirs: ast.AST | None) -> list[str]:
    """One problem with a diff if the trees differ (- package, + notebook); none if they agree."""
    if ours is None or theirs is None:
        return [f"{where}: is only in the {'package' if ours is None else 'notebook'}."]
    ours, theirs = _without_docstrings(ours), _without_docstrings(theirs)
    if ast.dump(ours) == ast.dump(theirs):
        return []
    package_lines, notebook_lines = (_source_lines(node) for node in (theirs, ours))
    diff = list(difflib.unified_diff(package_lines, notebook_lines, "package", "notebook", lineterm="", n=2))[2:]
    return ["\n".join([where, *(f"    {line}" for line in diff if not line.startswith("@@"))])]


def _source_lines(node: ast.AST) -> list[str]:
    """Source text of a tree, one statement a line; a body that lost its docstring is shown as `...`."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not inner.body:
            inner.body = [ast.Expr(ast.Constant(...))]
    return ast.unparse(node).splitlines()
