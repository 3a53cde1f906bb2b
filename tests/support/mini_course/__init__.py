"""A course of one notebook, number 77, small enough to be read in a test."""

from __future__ import annotations

from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labcore.course.author.notebooks import clean, notebook_text

HERE = Path(__file__).parent

SET_UP = f"""from __future__ import annotations
import labcore.course.exercises
labcore.course.exercises.__path__.append({str(HERE)!r})
from labcore.course import check, or_reference, progress
from labcore.kvcache.blocks import BlockPool as Plain"""

CELLS = (
    ("markdown", "# A mini notebook\nTwo minutes on CPU and GPU, no prerequisites."),
    ("code", SET_UP),
    ("code", "class BlockPool(Plain):\n    pass"),
    (
        "markdown",
        "**Exercise 77.1 · allocate · 8 min · ●○○**\n"
        "<details><summary>Solution</summary>The parent class knows how to take them all at once.</details>\n"
        "<details><summary>Answer</summary>Two blocks stay.</details>",
    ),
    (
        "code",
        "class BlockPool(BlockPool):  # NEW\n    def allocate(self, n: int) -> list[int]:\n"
        '        """Take n blocks."""\n'
        "        ### BEGIN SOLUTION\n        taken = super().allocate(n)\n        return taken[::1] + taken[:0]\n"
        "        ### END SOLUTION\n\n"
        'check("77.allocate", BlockPool)\nBlockPool = or_reference("77.allocate", BlockPool)',
    ),
    ("code", "pool = BlockPool(6, 4)\nlen(pool.allocate(2)), pool.num_free"),
    ("code", "lengths = [1, 2, 3]\n### BEGIN SOLUTION\ntotal = sum(length for length in lengths)\n### END SOLUTION"),
    ("code", 'check("77.total", total)\ntotal = or_reference("77.total", total)'),
    ("code", "total * 2"),
    (
        "code",
        "class LeakyPool(Plain):\n    def free(self, blocks):\n        ### BEGIN SOLUTION\n"
        "        return super().free(list(blocks))\n        ### END SOLUTION",
    ),
    ("code", 'check("77.leak", LeakyPool)'),
    ("code", 'progress("77")'),
)


def cell(kind: str, source: str) -> NotebookNode:
    return new_code_cell(source) if kind == "code" else new_markdown_cell(source)


def mini_notebook(*more: NotebookNode) -> NotebookNode:
    """The notebook in canonical form, not yet executed, with `more` cells at its end."""
    return clean(new_notebook(cells=[*(cell(*c) for c in CELLS), *more]))


def printed(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


def write(folder: Path, notebook: NotebookNode, name: str = "77_mini.ipynb") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(notebook_text(notebook), encoding="utf-8")
    return path
