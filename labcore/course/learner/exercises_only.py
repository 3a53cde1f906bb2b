"""Only the exercises of a notebook: what its checks need, and nothing that talks to a model or a clock.

    kept      imports, functions, classes, CONSTANTS and literals, the calls of check and or_reference
    left out  everything else: runs of the engine, figures, measurements

A class of thirty is judged in seconds a notebook, where a run of all cells takes minutes.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from labcore.course.author.notebooks import calls, parse_cell

if TYPE_CHECKING:
    from nbformat import NotebookNode

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LITERAL = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load)
JUDGES = ("check", "or_reference")


def exercises_only(notebook: NotebookNode) -> NotebookNode:
    """A copy in which each code cell keeps its definitions and its checks. A cell that doesn't parse is kept whole."""
    slim = copy.deepcopy(notebook)
    for cell in slim.cells:
        if cell.cell_type == "code":
            tree = parse_cell(cell.source)
            if tree is not None:
                cell.source = "\n".join(kept_lines(cell.source, tree))
            cell.outputs, cell.execution_count = [], None
    return slim


def kept_lines(source: str, tree: ast.Module) -> list[str]:
    """The lines of the statements that stay, as they stand: an error names the learner's own line."""
    lines, kept = source.split("\n"), []
    for statement in tree.body:
        if stays(statement):
            first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
            kept += lines[first - 1 : statement.end_lineno]
    return kept


def stays(statement: ast.stmt) -> bool:
    """Whether a statement of a cell defines something, or judges it."""
    if isinstance(statement, DEFINITIONS) or any(any(calls(statement, name)) for name in JUDGES):
        return True
    if not isinstance(statement, ast.Assign):
        return False
    named_as_constant = all(isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets)
    return named_as_constant or is_constant(statement.value)


def is_constant(value: ast.expr) -> bool:
    """Whether an expression is a literal, or arithmetic on literals."""
    return all(isinstance(node, LITERAL) for node in ast.walk(value))
