"""Flight records on disk: JSON lines. A header, one line a step, and a last line that proves nothing is missing.

    {"format": "labcore-recording", "version": 1, "num_blocks": 24, "block_size": 16, …, "pieces": {"523": " the"}}
    {"step": 1, "start": 0.0, "duration": 0.034, "before": [["arrive", 0, [], {…}]], "work": [0, 6], …}
    {"end": 1}

If events came after the last step, they are one more line, and the last one says {"end": 2, "pending": true}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labcore.files.output_file import output_file
from labcore.recorder.recording import EVENT_KINDS, Recording, StepRecord
from labcore.recorder.snapshot import pairs

FORMAT = "labcore-recording"
VERSION = 1
SIGNATURE = f'{{"format":"{FORMAT}"'
"""How the file begins."""
HEADER_FIELDS = ("num_blocks", "block_size", "num_host_blocks", "max_model_len", "policy")


def save(recording: Recording, path: str | Path) -> None:
    """Write `recording` to `path`, events between the last step and now included. Token texts go into the header.

    An older flight record is replaced, all at once. Raises ValueError if `path` is any other file.
    """
    records = recording.records + ([recording.pending] if recording.pending else [])
    header = {"format": FORMAT, "version": VERSION} | {name: getattr(recording, name) for name in HEADER_FIELDS}
    if recording.decode is not None:
        header["pieces"] = {str(token): recording.decode([token]) for token in sorted(_tokens(records))}
    end = {"end": len(records)} | ({"pending": True} if recording.pending else {})
    with output_file(path, lambda start: start.startswith(SIGNATURE), "a labcore flight record") as file:
        for line in (header, *map(_packed, records), end):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def load(path: str | Path) -> Recording:
    """Read a flight record. Raises ValueError, in one line, for a file that is foreign, cut short or too new."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().removesuffix("\n").split("\n")
    header = _parse(path, 1, lines[0])
    if header is None or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a labcore flight record — save one with llm.engine.recorder.save(path).")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {header.get('version')!r}, this labcore reads {VERSION} — "
            "record the run again, or read it with the labcore that wrote it."
        )
    end = _parse(path, len(lines), lines[-1])
    if end is None or end.get("end") != len(lines) - 2:
        raise ValueError(f"{path} is cut short after line {len(lines)} — copy it again, or record the run again.")
    for name in ("num_blocks", "block_size"):
        if name in header and not (isinstance(header[name], int) and header[name] >= 1):
            raise ValueError(f"{path}, line 1: {name} is {header[name]!r}; it must be a whole number of at least 1.")
    try:
        recording = Recording(**{name: header[name] for name in HEADER_FIELDS})
    except KeyError as missing:
        raise ValueError(f"{path}, line 1: the header lacks {missing} — record the run again.") from None
    for number, line in enumerate(lines[1:-1], 2):
        recording.records.append(_record(path, number, line))
    if end.get("pending") and recording.records:
        recording.pending = recording.records.pop()
    pieces = header.get("pieces")
    if pieces is not None:
        recording.decode = lambda token_ids: "".join(pieces.get(str(token), "") for token in token_ids)
    return recording


def _packed(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "start": round(record.start, 6),
        "duration": round(record.duration, 6),
        "before": record.before,
        "work": list(record.work),
        "tokens": list(record.tokens),
        "after": record.after,
        "pool_free": record.pool_free,
    }


def _record(path: str | Path, number: int, line: str) -> StepRecord:
    fields = _parse(path, number, line)
    try:
        record = StepRecord(**fields)
        for event in (*record.before, *record.after):
            if event[0] not in EVENT_KINDS or len(event) != 4:
                raise ValueError
    except (TypeError, ValueError, IndexError):
        raise ValueError(f"{path}, line {number} is not a step of a flight record — record the run again.") from None
    return record


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _tokens(records: list[StepRecord]) -> set[int]:
    found: set[int] = set()
    for record in records:
        found.update(token for _, token in pairs(record.tokens))
        for kind, _, _, detail in (*record.before, *record.after):
            if kind == "arrive":
                found.update(detail["tokens"])
    return {token for token in found if token >= 0}
