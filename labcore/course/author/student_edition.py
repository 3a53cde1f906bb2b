"""One notebook's student edition: the solutions taken out, everything else kept.

    cell in the master                               cell in the student edition
    ------------------------------------------       ------------------------------------------------
    def free(self, ids):                             def free(self, ids):
        \"\"\"Give back one reference each.\"\"\"              \"\"\"Give back one reference each.\"\"\"
        ### BEGIN SOLUTION                               raise NotImplementedError("your turn: 02.free")
        for block in ids: …
        ### END SOLUTION

What is taken away is remembered, so that `put_back` makes the master of it again, byte for byte: nothing else was lost.
It is strict: a marker without its end, an exercise without a solution, a line of a solution that stands anywhere else
(a cell, a hint, an output) is an error that names the place.
"""

from __future__ import annotations

import ast
import base64
import copy
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labcore.course.author.notebooks import MalformedNotebook, calls, cell_calls, parse_cell
from labcore.course.learner.exercise import YOUR_TURN, find_exercise

if TYPE_CHECKING:
    from nbformat import NotebookNode

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
LEAK_LENGTH = 15  # a line of a solution longer than this must not stand anywhere in the student edition
TALKING = ("check", "or_reference", "progress", "hint", "swap_test")  # calls whose output depends on the learner's progress
SOLUTION_DETAILS = re.compile(r"<details>\s*<summary>\s*Solution.*?</details>", re.DOTALL | re.IGNORECASE)
MARKDOWN_STUB = "*Your turn.*"


@dataclass(frozen=True)
class Cut:
    """Lines taken out of a cell: those from line `start` on (from 0), and the stub that stands there instead."""

    start: int
    solution: tuple[str, ...]  # the master's lines, markers included
    stub: tuple[str, ...]


@dataclass
class Edition:
    """A notebook's student edition, and everything removed from the master, by cell id."""

    notebook: NotebookNode
    cuts: dict[str, list[Cut]] = field(default_factory=dict)
    set_aside: dict[str, dict[str, Any]] = field(default_factory=dict)  # outputs, metadata, … of a cell
    exercise_ids: list[str] = field(default_factory=list)

    def solution_lines(self) -> set[str]:
        """Every line of a solution that is long enough to be recognised elsewhere."""
        lines = {line.strip() for cuts in self.cuts.values() for cut in cuts for line in cut.solution}
        return {line for line in lines if len(line) > LEAK_LENGTH and line not in (BEGIN, END)}


def student_edition(master: NotebookNode, name: str) -> Edition:
    """Remove the solutions from a master notebook. Raises MalformedNotebook with one line for each problem."""
    edition = Edition(copy.deepcopy(master))
    problems: list[str] = []
    waiting: list[tuple[int, NotebookNode, list[tuple[int, int]]]] = []  # cells whose exercise isn't known yet
    for number, cell in enumerate(edition.notebook.cells, 1):
        try:
            regions = solution_regions(cell)
            checked = checked_ids(cell)
        except MalformedNotebook as error:
            problems.append(f"{name}, cell {number}: {error}")
            continue
        if regions and cell.cell_type == "code":
            waiting.append((number, cell, regions))
        elif regions:
            _cut_markdown(edition, cell, regions)
        for exercise_id in checked:
            if exercise_id in edition.exercise_ids:
                problems.append(f"{name}, cell {number}: exercise {exercise_id} is checked for the second time.")
            elif not waiting:
                problems.append(
                    f"{name}, cell {number}: checks {exercise_id}, but nothing above is marked as its solution."
                )
            edition.exercise_ids.append(exercise_id)
        if checked:
            problems += _cut_exercise(edition, waiting, checked[0], cell, name)
            waiting = []
    problems += [
        f"{name}, cell {number}: has a solution, but no check below says which exercise it is of."
        for number, _, _ in waiting
    ]
    if not problems:
        _silence(edition)
        problems = [f"{name}, {leak}" for leak in leaks(edition)]
    if problems:
        raise MalformedNotebook("\n".join(problems))
    return edition


def put_back(edition: Edition) -> NotebookNode:
    """Restore the master: put everything removed back into the student edition."""
    notebook = copy.deepcopy(edition.notebook)
    for cell in notebook.cells:
        _undo(cell, edition.cuts.get(cell.id, []))
        cell.update(copy.deepcopy(edition.set_aside.get(cell.id, {})))
    return notebook


def nbgrader_source(edition: Edition) -> NotebookNode:
    """The notebook for the `source/` folder of an nbgrader course: solutions between markers, nbgrader's metadata.

    Solutions that nbgrader wouldn't find, folded into text or in a tagged cell, stay out.
    """
    notebook = copy.deepcopy(edition.notebook)
    for cell in notebook.cells:
        _undo(cell, [cut for cut in edition.cuts.get(cell.id, []) if cut.solution[0].strip() == BEGIN])
    return notebook


def solution_regions(cell: NotebookNode) -> list[tuple[int, int]]:
    """First and last line (from 0, markers included) of each solution in a cell; the whole of one tagged `solution`."""
    lines = cell.source.split("\n")
    regions, start = [], None
    for number, line in enumerate(lines):
        word = line.strip()
        if word not in (BEGIN, END):
            if re.search(r"\b(BEGIN|END) SOLUTION\b", line):
                raise MalformedNotebook(
                    f"line {number + 1}: a marker must be exactly `{BEGIN}` or `{END}`, on its own line."
                )
        elif word == BEGIN and start is not None:
            raise MalformedNotebook(f"line {number + 1}: `{BEGIN}` inside a solution that began in line {start + 1}.")
        elif word == BEGIN:
            start = number
        elif start is None:
            raise MalformedNotebook(f"line {number + 1}: `{END}` without `{BEGIN}` above it.")
        else:
            regions.append((start, number))
            start = None
    if start is not None:
        raise MalformedNotebook(f"line {start + 1}: `{BEGIN}` without `{END}` below it.")
    if not regions and "solution" in cell.metadata.get("tags", []):
        return [(0, len(lines) - 1)]
    if not regions and cell.cell_type == "markdown":
        return [_line_span(cell.source, match) for match in SOLUTION_DETAILS.finditer(cell.source)]
    return regions


def checked_ids(cell: NotebookNode) -> list[str]:
    """The exercises that a cell checks, in order."""
    arguments = [call.args[0] for call in cell_calls(cell, "check") if call.args]
    return [argument.value for argument in arguments if isinstance(argument, ast.Constant)]


def leaks(edition: Edition) -> list[str]:
    """Where a line of a solution can still be read: "cell 14: …". Looks into all that the file holds, and the hints."""
    found = []
    lines = sorted(edition.solution_lines())
    for number, cell in enumerate(edition.notebook.cells, 1):
        text = "\n".join(_texts(cell))
        found += [
            f"cell {number}: shows a line of a solution, `{line}` — mark it, reword it or tag the cell `answer`."
            for line in lines
            if line in text
        ]
    rest = "\n".join(_texts(edition.notebook.metadata))
    found += [f"notebook metadata: shows a line of a solution, `{line}`." for line in lines if line in rest]
    for exercise in (find_exercise(exercise_id) for exercise_id in edition.exercise_ids):
        if exercise is not None:
            told = "\n".join([exercise.spec, exercise.passed, *exercise.hints])
            found += [f"hints of {exercise.id}: show a line of a solution, `{line}`." for line in lines if line in told]
    return found


def _cut_exercise(
    edition: Edition, waiting: list[Any], exercise_id: str, check_cell: NotebookNode, name: str
) -> list[str]:
    """Put stubs into the cells of one exercise and mark them, and the cell of its check, for nbgrader."""
    problems = []
    grade_id = exercise_id.replace(".", "-")
    exercise = find_exercise(exercise_id)
    points = exercise.difficulty if exercise else 1
    for place, (number, cell, regions) in enumerate(waiting, 1):
        try:
            cuts = [_stub(cell.source, region, exercise_id) for region in regions]
        except SyntaxError as error:
            problems.append(f"{name}, cell {number}: isn't plain Python ({error.msg}), so no stub can be made for it.")
            continue
        edition.cuts[cell.id] = _apply(cell, cuts)
        if parse_cell(cell.source) is None:
            problems.append(f"{name}, cell {number}: the stub doesn't fit — let the markers enclose whole statements.")
        both = cell is check_cell
        _set_aside(edition, cell, "metadata")
        cell.metadata["nbgrader"] = _nbgrader(
            grade_id if place == 1 else f"{grade_id}-{place}", solution=True, points=points if both else None
        )
    if waiting and all(cell is not check_cell for _, cell, _ in waiting):
        _set_aside(edition, check_cell, "metadata")
        check_cell.metadata["nbgrader"] = _nbgrader(f"{grade_id}-check", solution=False, points=points)
    return problems


def _cut_markdown(edition: Edition, cell: NotebookNode, regions: list[tuple[int, int]]) -> None:
    lines = cell.source.split("\n")
    cuts = [Cut(start, tuple(lines[start : stop + 1]), (MARKDOWN_STUB,)) for start, stop in regions]
    edition.cuts[cell.id] = _apply(cell, cuts)


def _stub(source: str, region: tuple[int, int], exercise_id: str) -> Cut:
    """The stub for a solution: a raise in a function, elsewhere `name = ...` for each name that it defines."""
    start, stop = region
    lines = source.split("\n")
    inside = [(node, scope) for node, scope in _statements(_parse(source)) if start <= node.lineno - 1 <= stop]
    outermost, scope = inside[0] if inside else (None, None)  # the walk meets it first
    indent = " " * outermost.col_offset if outermost else re.match(r"\s*", lines[start])[0]
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        stub = [f'{indent}raise NotImplementedError("{YOUR_TURN}{exercise_id}")']
    else:
        names = dict.fromkeys(name for node, around in inside if around is scope for name in _binds(node))
        stub = [f"{indent}{name} = ...  # {YOUR_TURN}{exercise_id}" for name in names]
        stub = stub or [f"{indent}...  # {YOUR_TURN}{exercise_id}"]
    return Cut(start, tuple(lines[start : stop + 1]), tuple(stub))


def _parse(source: str) -> ast.Module:
    tree = parse_cell(source)
    return ast.parse(source) if tree is None else tree  # for its SyntaxError


def _statements(node: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.stmt, ast.AST | None]]:
    """Every statement of a tree, outer before inner, with the function or class that it stands in (None: neither)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, scope
        opens = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _statements(child, child if opens else scope)


def _binds(node: ast.stmt) -> list[str]:
    """Names that a statement gives a value to."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
    targets += [item.optional_vars for item in getattr(node, "items", ())]
    return [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]


def _apply(cell: NotebookNode, cuts: list[Cut]) -> list[Cut]:
    """Apply the cuts of one cell; returns them with their positions in the new text."""
    lines, placed = cell.source.split("\n"), []
    shift = 0
    for cut in cuts:
        start = cut.start + shift
        lines[start : start + len(cut.solution)] = cut.stub
        placed.append(Cut(start, cut.solution, cut.stub))
        shift += len(cut.stub) - len(cut.solution)
    cell.source = "\n".join(lines)
    return placed


def _undo(cell: NotebookNode, cuts: list[Cut]) -> None:
    lines = cell.source.split("\n")
    for cut in reversed(cuts):
        lines[cut.start : cut.start + len(cut.stub)] = cut.solution
    cell.source = "\n".join(lines)


def _silence(edition: Edition) -> None:
    """Remove what reveals a solution: outputs of exercises, foreign metadata, any text with a solution's line."""
    lines = edition.solution_lines()
    for cell in edition.notebook.cells:
        tags = cell.metadata.get("tags", [])
        keep = {key: cell.metadata[key] for key in ("tags", "nbgrader") if key in cell.metadata}
        if dict(cell.metadata) != keep:
            _set_aside(edition, cell, "metadata")
            cell.metadata = keep
        if any(line in text for line in lines for text in _texts(cell.get("attachments", {}))):
            _set_aside(edition, cell, "attachments")
            del cell["attachments"]
        if cell.cell_type != "code" or not cell.outputs:
            continue
        tree = parse_cell(cell.source)
        talks = cell.id in edition.cuts or (tree and any(True for name in TALKING for _ in calls(tree, name)))
        if talks or "answer" in tags or any(line in text for line in lines for text in _texts(cell.outputs)):
            _set_aside(edition, cell, "outputs")
            _set_aside(edition, cell, "execution_count")
            cell.outputs, cell.execution_count = [], None


def _set_aside(edition: Edition, cell: NotebookNode, key: str) -> None:
    edition.set_aside.setdefault(cell.id, {}).setdefault(key, copy.deepcopy(cell[key]))


def _nbgrader(grade_id: str, solution: bool, points: int | None) -> dict[str, Any]:
    """Cell metadata of nbgrader, schema 3. `points` makes a cell graded; a graded one that is no solution is locked."""
    graded = points is not None
    metadata = {
        "grade": graded,
        "grade_id": grade_id,
        "locked": graded and not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    return {**metadata, "points": points} if graded else metadata


def _texts(part: Any) -> Iterator[str]:
    """Every string in a piece of a notebook, as it is, without HTML escapes, and decoded where it is base64."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _texts(value)
    elif isinstance(part, str):
        yield part
        if "&" in part:
            yield html.unescape(part)
        if re.fullmatch(r"[A-Za-z0-9+/\s]{24,}={0,2}\s*", part):
            try:
                yield base64.b64decode(part).decode("utf-8", "ignore")
            except ValueError:
                pass


def _line_span(text: str, match: re.Match[str]) -> tuple[int, int]:
    return text.count("\n", 0, match.start()), text.count("\n", 0, match.end())
