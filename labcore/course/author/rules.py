"""The rules for notebooks, each a function that returns its violations.

    rules_broken(path)  →  ["cell 14: 34 lines, a cell has at most 30", …]

A test checks every notebook; `labcore course rules 02` lists a notebook's violations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from labcore.course.author.notebooks import (
    KERNELSPEC,
    calls,
    cell_calls,
    clean,
    code_cells,
    notebook_text,
    parse_cell,
    read_notebook,
)
from labcore.course.author.promotion import collect, definitions
from labcore.course.author.student_edition import BEGIN
from labcore.course.curriculum import Lesson, lesson, notebook_files
from labcore.course.learner.claims import load_claims
from labcore.course.learner.exercise import Exercise, find_exercise, notebook_exercises

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_LINES, MAX_MEDIAN = 30, 8
MAX_IGNORED_SHARE = 0.2
MAX_BYTES = 1_000_000
MIN_EXERCISES = 3
IGNORED = "nbval-ignore-output"

# Headings (or bold openings) in order; others may stand between them.
SECTIONS = (
    "set-up",
    "feel the pain",
    "predict",
    "by hand",
    "see it",
    "build it",
    "exercises",
    "oracle",
    "plug it in",
    "measure",
    "claims",
    "how vllm",
    "recap",
)
FIRST_SECTIONS = ("set-up", "recap")  # those of notebook 00, which builds no part
OPENING_WORDS = ("minutes", "cpu", "gpu", "prerequisites")  # of the first cell, which is also the title

NOT_FOR_FILES = {
    "an absolute path": re.compile(
        r"(?<![\w.:/])/(?:home|Users|root|tmp|work|var|private|usr|opt|mnt|content)/|\b[A-Z]:\\"
    ),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{5,}"),
    "a clock time or a date": re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\b20\d\d-\d\d-\d\d\b|\b(?:Wall time|CPU times):"),
}


@dataclass(frozen=True)
class Written:
    """One notebook as the rules see it."""

    path: Path
    notebook: NotebookNode

    @property
    def number(self) -> str:
        return self.path.stem[:2]

    @property
    def lesson(self) -> Lesson | None:
        return lesson(self.number)

    @property
    def builds_a_part(self) -> bool:
        return self.lesson is not None and bool(self.lesson.parts)

    def code(self) -> Iterator[tuple[int, NotebookNode]]:
        return code_cells(self.notebook)

    def trees(self) -> Iterator[tuple[int, ast.Module]]:
        for number, cell in self.code():
            tree = parse_cell(cell.source)
            if tree is not None:
                yield number, tree

    def markdown(self) -> str:
        return "\n".join(cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")


def rules_broken(path: Path) -> list[str]:
    """All violations of one notebook; empty if there are none."""
    written = Written(path, read_notebook(path))
    return [problem for rule in RULES for problem in rule(written)]


def has_its_lesson(n: Written) -> list[str]:
    if n.lesson is None:
        return [f"{n.path.name}: the course has no lesson {n.number} — see labcore.course.curriculum."]
    return [] if n.lesson.notebook == n.path.stem else [f"{n.path.name}: the course calls it {n.lesson.notebook}.ipynb."]


def is_in_canonical_form(n: Written) -> list[str]:
    text = n.path.read_text(encoding="utf-8")
    same = text == notebook_text(clean(read_notebook(n.path)))
    return [] if same else ["the file isn't as `labcore course run` writes it: run it on this notebook."]


def was_run_top_to_bottom(n: Written) -> list[str]:
    counts = [cell.execution_count for _, cell in n.code() if cell.source.strip()]
    right = list(range(1, len(counts) + 1))
    return (
        [] if counts == right else [f"execution counts are not 1 … {len(counts)}: run the notebook in a fresh kernel."]
    )


def cells_are_short(n: Written) -> list[str]:
    lengths = {number: len(cell.source.split("\n")) for number, cell in n.code()}
    broken = [
        f"cell {number}: {length} lines, a cell has at most {MAX_LINES}"
        for number, length in lengths.items()
        if length > MAX_LINES
    ]
    middle = median(lengths.values()) if lengths else 0
    return broken + (
        [f"the median code cell has {middle:g} lines, at most {MAX_MEDIAN}"] if middle > MAX_MEDIAN else []
    )


def few_outputs_are_ignored(n: Written) -> list[str]:
    ignored = [(number, cell) for number, cell in n.code() if IGNORED in cell.metadata.get("tags", [])]
    share = len(ignored) / max(1, sum(1 for _ in n.code()))
    broken = [
        f"cell {number}: its output is ignored, so it must hold an `assert`"
        for number, cell in ignored
        if not any(isinstance(node, ast.Assert) for node in ast.walk(parse_cell(cell.source) or ast.Module([], [])))
    ]
    if share >= MAX_IGNORED_SHARE:
        broken.append(f"{share:.0%} of the code cells have ignored outputs; fewer than {MAX_IGNORED_SHARE:.0%} may")
    return broken


def nothing_is_skipped_by_nbval(n: Written) -> list[str]:
    """Tags and comments that switch nbval off altogether, and errors kept as outputs."""
    tags = {"nbval-skip", "nbval-check-output", "raises-exception"}
    return [
        f"cell {number}: the tag {tag} has no place here"
        for number, cell in n.code()
        for tag in sorted(tags & set(cell.metadata.get("tags", [])))
    ] + [
        f"cell {number}: a NBVAL_… comment; use the tag {IGNORED}"
        for number, cell in n.code()
        if "NBVAL_" in cell.source
    ]


def file_is_small(n: Written) -> list[str]:
    size = n.path.stat().st_size
    return [] if size < MAX_BYTES else [f"the file has {size:,} bytes; it must stay below {MAX_BYTES:,}"]


def has_no_widget_state(n: Written) -> list[str]:
    return ["metadata.widgets must go"] if "widgets" in n.notebook.metadata else []


def runs_on_python3(n: Written) -> list[str]:
    spec = n.notebook.metadata.get("kernelspec", {})
    return [] if spec.get("name") == KERNELSPEC["name"] else [f"kernel is {spec.get('name')!r}; it must be 'python3'"]


def outputs_are_the_same_everywhere(n: Written) -> list[str]:
    """No stderr and no errors; no paths, addresses, clock times in what is stored."""
    broken = []
    for number, cell in n.code():
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                broken.append(f"cell {number}: stores {'an error' if output.output_type == 'error' else 'stderr'}")
            text = str(output.get("text", "")) + "".join(
                str(value) for mime, value in output.get("data", {}).items() if not mime.startswith("image/p")
            )
            broken += [
                f"cell {number}: its output shows {what}"
                for what, pattern in NOT_FOR_FILES.items()
                if pattern.search(text)
            ]
    return broken


def opening_tells_what_to_expect(n: Written) -> list[str]:
    first = n.notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        return ["the first cell must be text that opens with the title, `# …`"]
    words = [word for word in OPENING_WORDS if word not in first.source.lower()]
    words += [part for part in (n.lesson.parts if n.lesson else ()) if f"labcore/{part.replace('.', '/')}" not in first.source]
    return [f"the first cell doesn't mention {', '.join(words)}"] if words else []


def sections_are_in_order(n: Written) -> list[str]:
    """The sections appear as headings or bold openings, in their order; others may stand between them."""
    lines = [line.lower() for line in n.markdown().split("\n") if re.match(r"#{1,4} |\*\*", line)]
    lines = [line.replace("setup", "set-up").replace("set up", "set-up") for line in lines]
    place = 0
    for section in SECTIONS if n.builds_a_part else FIRST_SECTIONS:
        found = next((i for i in range(place, len(lines)) if section in lines[i]), None)
        if found is None:
            return [f"section “{section}” is missing, or not where it belongs"]
        place = found + 1
    return []


def recap_asks_three_questions(n: Written) -> list[str]:
    recap = re.split(r"(?im)^#+ .*recap.*$", n.markdown())[-1]
    broken = [] if recap.count("?") >= 3 or not n.builds_a_part else ["the recap asks fewer than three questions"]
    return broken + ([] if "next" in recap.lower() else ["the recap doesn't say what comes next"])


def first_check_comes_early(n: Written) -> list[str]:
    if not n.builds_a_part:
        return []
    first = next((number for number, tree in n.trees() if any(True for _ in calls(tree, "check"))), None)
    total = len(n.notebook.cells)
    if first is None:
        return ["no exercise is checked"]
    return (
        [] if first <= total / 3 else [f"the first check is in cell {first} of {total}; it belongs in the first third"]
    )


def exercises_are_complete(n: Written) -> list[str]:
    """Every exercise has its headline, is checked once; three at least, one of them a bug hunt."""
    exercises = notebook_exercises(n.number)
    checked = [
        call.args[0].value
        for _, tree in n.trees()
        for call in calls(tree, "check")
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    broken = [
        f"{e}: is checked, but isn't in labcore/course/exercises/nb{n.number}.py"
        for e in checked
        if e not in {exercise.id for exercise in exercises}
    ]
    for number, exercise in enumerate(exercises, 1):
        broken += _exercise_broken(n, number, exercise, checked)
    if n.builds_a_part and len(exercises) < MIN_EXERCISES:
        broken.append(f"{len(exercises)} exercises; a notebook has at least {MIN_EXERCISES}")
    if n.builds_a_part and not any(exercise.kind == "bug hunt" for exercise in exercises):
        broken.append("none of the exercises is a bug hunt")
    return broken


def exercise_methods_are_those_to_be_written(n: Written) -> list[str]:
    """`Exercise.methods` names the methods with a solution in them: those that are borrowed until the learner's pass."""
    written: set[str] = set()
    broken, marked = [], False
    for _, cell in n.code():
        tree = parse_cell(cell.source) or ast.Module([], [])
        lines = [number for number, line in enumerate(cell.source.splitlines(), 1) if line.strip() == BEGIN]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
                written |= {m.name for m in methods if any(m.lineno <= line <= m.end_lineno for line in lines)}
        marked = marked or bool(lines)
        for call in cell_calls(cell, "check"):
            exercise = find_exercise(call.args[0].value)
            if exercise is not None and marked and set(exercise.methods) != written:
                broken.append(f"{exercise.id}: methods are {exercise.methods}, the learner writes {sorted(written)}")
            written, marked = set(), False
    return broken


def checks_stand_alone(n: Written) -> list[str]:
    """A check is in no cell with a solution: nbgrader grades a cell by itself only if it is locked."""
    return [
        f"cell {number}: a check stands in the cell of its solution; give it the next one"
        for number, cell in n.code()
        if BEGIN in cell.source and any(cell_calls(cell, "check"))
    ]


def defines_nothing_of_earlier_notebooks(n: Written) -> list[str]:
    promoted, _ = collect(n.path.parent)
    earlier = {name.rpartition(".")[2]: symbol for name, symbol in promoted.items() if symbol.notebook < n.number}
    return [
        f"cell {number}: defines {name}, which notebook {earlier[name].notebook} owns: import it"
        for number, tree in n.trees()
        for name in definitions(tree)
        if name in earlier
    ]


def patches_nothing(n: Written) -> list[str]:
    """No attribute of an imported labcore object, or of a class, is assigned to from outside."""
    imported: set[str] = set()
    broken = []
    for number, tree in n.trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "labcore":
                imported |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {alias.asname or "labcore" for alias in node.names if alias.name.split(".")[0] == "labcore"}
        imported |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        broken += [
            f"cell {number}: patches `{name}` from outside; leave a seam, or subclass it"
            for name in _patched(tree)
            if name in imported
        ]
    return broken


def leaves_private_names_alone(n: Written) -> list[str]:
    """No `_name` of anything imported: the next release of a library, or of labcore, may not have it."""
    imported: set[str] = set()
    broken = []
    for number, tree in n.trees():
        names = [
            alias for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
        ]
        imported |= {alias.asname or alias.name.split(".")[0] for alias in names}
        private = [alias.name for alias in names if _is_private(alias.name.split(".")[-1])]
        private += [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and _root_name(node) in imported
        ]
        broken += [f"cell {number}: uses `{name}`, which is private" for name in private]
    return broken


def claims_are_shown(n: Written) -> list[str]:
    """The claims that `data/claims.json` assigns to this notebook are shown by `ledger(...)`."""
    owned = {claim.id for claim in load_claims() if claim.notebook == n.number}
    shown = {
        arg.value
        for _, tree in n.trees()
        for call in calls(tree, "ledger")
        for arg in call.args
        if isinstance(arg, ast.Constant)
    }
    return [f"claim {claim!r} is this notebook's, but no ledger(…) shows it" for claim in sorted(owned - shown)]


RULES: tuple[Callable[[Written], list[str]], ...] = (
    has_its_lesson,
    is_in_canonical_form,
    was_run_top_to_bottom,
    cells_are_short,
    few_outputs_are_ignored,
    nothing_is_skipped_by_nbval,
    file_is_small,
    has_no_widget_state,
    runs_on_python3,
    outputs_are_the_same_everywhere,
    opening_tells_what_to_expect,
    sections_are_in_order,
    recap_asks_three_questions,
    first_check_comes_early,
    exercises_are_complete,
    exercise_methods_are_those_to_be_written,
    checks_stand_alone,
    defines_nothing_of_earlier_notebooks,
    patches_nothing,
    leaves_private_names_alone,
    claims_are_shown,
)


def strictly_compared_share(folder: Path) -> float:
    """Share of all code cells of the course whose stored output is compared in full."""
    cells = [cell for path in notebook_files(folder) for _, cell in code_cells(read_notebook(path))]
    return sum(IGNORED not in cell.metadata.get("tags", []) for cell in cells) / max(1, len(cells))


def _exercise_broken(n: Written, number: int, exercise: Exercise, checked: list[str]) -> list[str]:
    broken = []
    if exercise.headline(number) not in n.markdown():
        broken.append(f"{exercise.id}: no text has its headline, {exercise.headline(number)}")
    if checked.count(exercise.id) != 1:
        broken.append(f"{exercise.id}: is checked {checked.count(exercise.id)} times, must be once")
    return broken


def _patched(tree: ast.AST) -> Iterator[str]:
    """Names whose attributes are assigned, deleted, or set by setattr: `Pool.free = …`, `setattr(Pool, …)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield _root_name(node)
    for call in (*calls(tree, "setattr"), *calls(tree, "delattr")):
        if call.args:
            yield _root_name(call.args[0])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
