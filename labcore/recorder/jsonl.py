"""Flight records on disk, as JSON lines: a header, one line per step, and an end line that detects truncation.

    {"format": "labcore-recording", "version": 2, "num_blocks": 24, "block_size": 16, …, "pieces": {"523": " the"}}
    {"step": 1, "start": 0.0, "duration": 0.034, "planned": [["arrive", 0, [], {…}]], "chunks": [0, 6], …}
    {"end": 1}

Events after the last step take one more line; the end line then reads {"end": 2, "pending": true}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labcore.files.output_file import output_file
from labcore.recorder.step_record import EVENT_KINDS, StepRecord, pairs

FORMAT = "labcore-recording"
VERSION = 2
SIGNATURE = f'{{"format":"{FORMAT}"'
"""First characters of the file."""
HEADER_FIELDS = ("num_blocks", "block_size", "num_host_blocks", "max_model_len", "policy")

Decode = Callable[[Sequence[int]], str]
"""Token ids → text."""


class FileContents(NamedTuple):
    """A flight record as plain parts: `header` has HEADER_FIELDS; `pending` holds events after the last step."""

    header: dict[str, Any]
    records: list[StepRecord]
    pending: StepRecord | None
    decode: Decode | None


def save(
    path: str | Path,
    header: Mapping[str, Any],
    records: Sequence[StepRecord],
    pending: StepRecord | None = None,
    decode: Decode | None = None,
) -> None:
    """Write a flight record. The text of each token goes into the header if there is a decoder.

    Replaces an existing flight record atomically. Raises ValueError if `path` is any other file.
    """
    written = [*records, pending] if pending else list(records)
    first = {"format": FORMAT, "version": VERSION} | {name: header[name] for name in HEADER_FIELDS}
    if decode is not None:
        first["pieces"] = {str(token): decode([token]) for token in sorted(_token_ids(written))}
    end = {"end": len(written)} | ({"pending": True} if pending else {})
    with output_file(path, lambda start: start.startswith(SIGNATURE), "a labcore flight record") as file:
        for line in (first, *map(_to_json, written), end):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def load(path: str | Path) -> FileContents:
    """Read a flight record. Raises ValueError, in one line, for a foreign file, a truncated one or another version."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().removesuffix("\n").split("\n")
    first = _parse(lines[0])
    if first is None or first.get("format") != FORMAT:
        raise ValueError(f"{path} is not a labcore flight record — save one with llm.engine.recorder.save(path).")
    if first.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {first.get('version')!r}, this labcore reads {VERSION} — "
            "record the run again, or read it with the labcore that wrote it."
        )
    end = _parse(lines[-1])
    if end is None or end.get("end") != len(lines) - 2:
        raise ValueError(f"{path} is cut short after line {len(lines)} — copy it again, or record the run again.")
    header = _header(path, first)
    records = [_from_json(path, number, line) for number, line in enumerate(lines[1:-1], 2)]
    pending = records.pop() if end.get("pending") and records else None
    return FileContents(header, records, pending, _decoder(first.get("pieces")))


def _header(path: str | Path, first: dict[str, Any]) -> dict[str, Any]:
    for name in ("num_blocks", "block_size"):
        if name in first and not (isinstance(first[name], int) and first[name] >= 1):
            raise ValueError(f"{path}, line 1: {name} is {first[name]!r}; it must be a whole number of at least 1.")
    try:
        return {name: first[name] for name in HEADER_FIELDS}
    except KeyError as missing:
        raise ValueError(f"{path}, line 1: the header lacks {missing} — record the run again.") from None


def _decoder(pieces: dict[str, str] | None) -> Decode | None:
    if pieces is None:
        return None
    return lambda token_ids: "".join(pieces.get(str(token), "") for token in token_ids)


def _to_json(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "start": round(record.start, 6),
        "duration": round(record.duration, 6),
        "planned": record.planned,
        "chunks": list(record.chunks),
        "tokens": list(record.tokens),
        "updated": record.updated,
        "pool_free": record.pool_free,
    }


def _from_json(path: str | Path, number: int, line: str) -> StepRecord:
    try:
        record = StepRecord(**_parse(line))
        for event in (*record.planned, *record.updated):
            if event[0] not in EVENT_KINDS or len(event) != 4:
                raise ValueError
    except (TypeError, ValueError, IndexError):
        raise ValueError(f"{path}, line {number} is not a step of a flight record — record the run again.") from None
    return record


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _token_ids(records: Sequence[StepRecord]) -> set[int]:
    found: set[int] = set()
    for record in records:
        found.update(token for _, token in pairs(record.tokens))
        for kind, _, _, detail in (*record.planned, *record.updated):
            if kind == "arrive":
                found.update(detail["tokens"])
    return {token for token in found if token >= 0}
