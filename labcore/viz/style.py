"""Style of the figures: palette, letters, escaping of names. Colour is always paired with a letter or a pattern.

Fills are Paul Tol's "light" scheme, made for labelled cells with dark text and safe for common colour blindness. Every
figure has its own light background, so that it looks the same in light and dark JupyterLab.
"""

from __future__ import annotations

from html import escape
from typing import Any

PAPER = "#fbfbf9"
INK = "#1c1c1c"
FAINT = "#5f5f5f"
GRID = "#dcdcd6"
EMPTY = "#fff"
CACHED = "#ddd"
PALETTE = ("#7ad", "#e86", "#ed8", "#4b9", "#fab", "#bc3", "#9df", "#aa0")

# span state → letter, colour, pattern
SPANS = {
    "waiting": ("w", "#eee", ""),
    "prefill": ("P", "#e86", "/"),
    "decode": ("D", "#7ad", ""),
    "preempted": ("X", "#fab", "x"),
    "swapped": ("S", "#bc3", "."),
    "idle": ("i", EMPTY, "-"),
}


def hatch(fill: str, shape: str) -> dict[str, Any]:
    """Plotly pattern over a fill, for bars and areas. shape: "", "/", "x", "-" or "."."""
    return {"shape": shape, "bgcolor": fill, "fgcolor": INK, "fgopacity": 0.4, "size": 6, "solidity": 0.25}


def letter(number: int) -> str:
    """A … Z, AA, AB, …: label of request `number` inside a cell."""
    name = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        name = chr(65 + digit) + name
    return name


def colour(number: int) -> str:
    """Fill of request `number`; colours repeat after eight, letters do not."""
    return PALETTE[number % len(PALETTE)]


def short(text: str, length: int = 18) -> str:
    """At most `length` characters on one line, with an ellipsis if cut."""
    text = "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def safe(text: str) -> str:
    """Escape text for plotly, which interprets <b>, <a href> and $…$ as markup."""
    return escape(text, quote=False).replace("$", "&#36;")
