"""Text for verdicts: values in one line, the same in every run, and wrapped lines."""

from __future__ import annotations

import re
import textwrap
from typing import Any

WIDTH = 116
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")


def show(value: Any, width: int = 80) -> str:
    """`value` in one short line that reads the same in every run: sets sorted, no addresses."""
    try:
        if isinstance(value, (set, frozenset)) and value:
            return shorten("{" + ", ".join(sorted(show(item) for item in value)) + "}", width)
        return shorten(repr(value), width)
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def shorten(text: str, width: int = 80) -> str:
    """A text in one line of at most `width` characters, without addresses."""
    text = _ADDRESS.sub("0x…", " ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def sentence(text: str) -> str:
    """The text with a full stop, unless it ends already."""
    return text if text.endswith((".", "!", "?", "…")) else text + "."


def wrapped(lead: str, text: str, tail: str = "") -> str:
    """`lead`, three spaces and the text in lines of at most WIDTH characters, each below where the text began.

    tail: a few words that stay together, at the end of the last line or on a line of their own.
    """
    indent = " " * (len(lead) + 3)
    lines = textwrap.wrap(text, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    if tail and len(indent) + len(lines[-1]) + 3 + len(tail) <= WIDTH:
        lines[-1] += "   " + tail
    elif tail:
        lines.append(tail)
    return "\n".join([f"{lead}   {lines[0]}", *(indent + line for line in lines[1:])])
