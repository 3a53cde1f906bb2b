"""Reading a figure's data in tests, whichever way plotly stores an array: as a list, or as a base64 typed array."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def values(array: Any) -> list:
    """A trace's array as a plain list."""
    if isinstance(array, dict) and "bdata" in array:
        decoded = np.frombuffer(base64.b64decode(array["bdata"]), dtype=np.dtype(array["dtype"]))
        shape = [int(n) for n in str(array.get("shape", decoded.size)).split(",")]
        return decoded.reshape(shape).tolist()
    return list(array)


def typed_arrays(part: Any) -> int:
    """How many base64 typed arrays a figure holds."""
    if isinstance(part, dict):
        return ("bdata" in part) + sum(map(typed_arrays, part.values()))
    return sum(map(typed_arrays, part)) if isinstance(part, list) else 0


def at_step(figure: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The traces as the slider leaves them at `step`: the frame's changes over the figure's own data."""
    frame = next(frame for frame in figure["frames"] if frame["name"] == str(step))
    traces = list(figure["data"])
    for place, change in zip(frame["traces"], frame["data"], strict=True):
        traces[place] = merged(traces[place], change)
    return traces


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Dicts merge, arrays are replaced: plotly's own rule for frames."""
    out = dict(old)
    for key, value in new.items():
        nested = isinstance(value, dict) and "bdata" not in value and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if nested else value
    return out
