"""Types of command-line options: what can't be measured is refused before anything is loaded."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a whole number of at least 1")
    return int(text)


def minutes(text: str) -> float:
    """A number above 0, up to a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1440:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number of minutes above 0, up to 1440")
    return value
