"""Notebook files: read, written in one canonical form, and executed in place in a fresh kernel.

What varies between runs is removed: timings in the metadata, widget state, the division of printed text into messages.
The rest is the same after each execution, so that diffs show changes and nbval can compare outputs.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labcore.course.project import write_atomically

if TYPE_CHECKING:
    from nbformat import NotebookNode

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"name": "python"}
KEPT_CELL_METADATA = ("tags", "nbgrader")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
RUN_LIMIT_SECONDS = 600  # for one cell: far above the three minutes that a whole notebook may take


class MalformedNotebook(ValueError):
    """An invalid notebook. The message names file, place and remedy, in one line."""


class CellFailed(RuntimeError):
    """A notebook was not executed to its end; the message names the cell and the reason."""


class RunStopped(RuntimeError):
    """A cell ended the run of its notebook: it raised, it took too long, or its kernel died.

    number   the cell's place among all cells, counted from 1 as a person would
    reason   in one line
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"cell {number}: {reason}")
        self.number = number
        self.reason = reason


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C was pressed while cell `number` was running."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of format 4. Raises MalformedNotebook for anything else."""
    import nbformat

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MalformedNotebook(f"{path.name}: can't be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise MalformedNotebook(f"{path.name}: is not UTF-8 text — save it again from Jupyter.") from error
    try:
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
        _give_ids(notebook)
    except Exception as error:  # nbformat lets out errors of four libraries
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise MalformedNotebook(f"{path.name}: is not a notebook ({reason}) — restore it from git.") from error
    return notebook


def notebook_text(notebook: NotebookNode) -> str:
    """The file content: what Jupyter itself writes, with a newline at the end."""
    import nbformat

    return nbformat.writes(notebook).rstrip("\n") + "\n"


def clean(notebook: NotebookNode) -> NotebookNode:
    """Bring a notebook into its canonical form, in place, and return it."""
    from nbformat import from_dict

    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    seen: set[str] = set()
    for cell in notebook.cells:
        cell.source = cell.source.rstrip("\n")
        cell.metadata = from_dict({key: cell.metadata[key] for key in KEPT_CELL_METADATA if cell.metadata.get(key)})
        cell.id = _cell_id(cell.source, seen)
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET_VIEW, None)
    return notebook


def merge_streams(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of printed text become one: where they were cut depends on the speed of the machine."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def run_notebook(path: Path) -> float:
    """Execute a notebook in place, top to bottom in a fresh kernel in its own folder; return the seconds it took.

    The file is written only if every cell ran, in canonical form. Raises CellFailed with the cell's number and error, or
    if the file was saved meanwhile.
    """
    notebook, before = read_notebook(path), path.read_bytes()
    started = time.perf_counter()
    try:
        execute(notebook, path.parent)
    except RunStopped as error:
        raise CellFailed(f"{path.name}, {error}") from error
    elapsed = time.perf_counter() - started
    if path.read_bytes() != before:
        raise CellFailed(f"{path.name} was edited while it ran; the edit was kept, the outputs were not — run it again.")
    write_atomically(path, notebook_text(clean(notebook)))
    return elapsed


def execute(
    notebook: NotebookNode,
    folder: Path,
    *,
    allow_errors: bool = False,
    limit: float = RUN_LIMIT_SECONDS,
    progress: str = "off",
    on_cell: Callable[[NotebookNode], None] | None = None,
) -> None:
    """Run the cells of `notebook` in place, in a fresh kernel in `folder`. Needs nbclient.

    allow_errors   go on after a cell that raises
    limit          seconds that one cell may take
    progress       the kernel's LABCORE_PROGRESS
    on_cell        called with each cell when it is done
    Raises RunStopped for a cell that raised, took longer than the limit, wrote more than 10 MB, or ended its kernel;
    CellInterrupted on Ctrl-C; RuntimeError if there is no kernel to be had. The kernel has ended afterwards.
    """
    try:
        from labcore.course.kernel import INTERRUPTED, CellStopped, Kernel, ctrl_c_calls
    except ModuleNotFoundError as error:
        raise RuntimeError(f"running a notebook needs {error.name} — pip install nbclient ipykernel.") from error

    kernel = Kernel(notebook, folder, KERNELSPEC["name"], limit, allow_errors)
    with _environment(LABCORE_PROGRESS=progress), ctrl_c_calls(partial(kernel.stop, INTERRUPTED)), ExitStack() as stack:
        try:
            stack.enter_context(kernel.setup_kernel())
        except Exception as error:  # KeyError where Jupyter knows no such kernel, OSError, RuntimeError, …
            raise RuntimeError(f"no Jupyter kernel could be started ({error}) — see labcore doctor.") from error
        for number, cell in enumerate(notebook.cells, 1):
            try:
                kernel.execute_cell(cell, number - 1, execution_count=kernel.code_cells_executed + 1)
            except CellStopped as error:
                if kernel.stopped == INTERRUPTED:
                    raise CellInterrupted(number) from None
                raise RunStopped(number, str(error)) from error
            except Exception as error:
                raise RunStopped(number, _reason(error)) from error
            if on_cell is not None:
                on_cell(cell)


def _reason(error: Exception) -> str:
    if hasattr(error, "ename"):
        return f"{error.ename}: {error.evalue}"
    return f"{type(error).__name__}: {error}"


def parse_cell(source: str) -> ast.Module | None:
    """The syntax tree of a code cell with its line numbers; None for a cell of another language, or a broken one."""
    if source.lstrip().startswith("%%"):
        return None
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in source.split("\n")]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells with their place among all cells, counted from 1 as a person would."""
    return ((n, cell) for n, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code")


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Every call of the plain function `name` in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def cell_calls(cell: NotebookNode, name: str) -> Iterator[ast.Call]:
    """Every call of the plain function `name` in a cell; none in text, and in code that doesn't parse."""
    tree = parse_cell(cell.source) if cell.cell_type == "code" else None
    return iter(()) if tree is None else calls(tree, name)


def _give_ids(notebook: NotebookNode) -> None:
    """Notebooks older than format 4.5 have no cell ids; the student edition needs them."""
    if notebook.nbformat_minor < 5:
        notebook.nbformat_minor, seen = 5, set()
        for cell in notebook.cells:
            cell.id = _cell_id(cell.source, seen)


def _cell_id(source: str, seen: set[str]) -> str:
    """An id that depends on the text alone, so that writing a notebook anew doesn't change every cell of its file."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    cell_id, copies = digest, 1
    while cell_id in seen:
        copies += 1
        cell_id = f"{digest}-{copies}"
    seen.add(cell_id)
    return cell_id


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
