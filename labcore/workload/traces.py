"""Traces: arrival times, prompt and output lengths of requests. Extended in notebook 09.

`load_trace` reads three formats, recognised by the first line:

    ours       arrival_s,prompt_tokens,output_tokens          CSV; `#` lines are comments
    Azure      TIMESTAMP,ContextTokens,GeneratedTokens        CSV of the Azure LLM inference trace 2023
    Mooncake   {"timestamp": ms, "input_length": …, …}        JSONL of the FAST'25 traces, with hash_ids

Two synthetic traces are in `data/traces/`, made by seeded scripts.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

CHAT_TRACE = Path(__file__).resolve().parents[2] / "data" / "traces" / "chat.csv"
CONVERSATION_TRACE = CHAT_TRACE.with_name("conversations.jsonl")
"""Multi-turn conversations, with block hashes."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival: seconds since the first request. prompt_tokens, output_tokens: at least 1 each.
    block_hashes: one id per 512-token block of the prompt, if the trace has them; equal ids mean equal content after an
    equal prefix.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] | None = None


def load_trace(path: str | Path = CHAT_TRACE) -> list[TraceRequest]:
    """Read a trace, sorted by arrival; the first request arrives at 0.

    path: a file in one of the three formats; by default the chat trace of the course.
    Raises FileNotFoundError, and ValueError for an unknown format, an empty trace or an invalid line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no request log {path.name!r}: check the path; load_trace() reads the shipped one.")
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip() and not line.startswith("#")]
    requests = sorted(_parse(path.name, lines), key=lambda request: request.arrival)
    if not requests:
        raise ValueError(f"{path.name} holds no requests: a log needs at least one line after its header.")
    return [replace(request, arrival=request.arrival - requests[0].arrival) for request in requests]


def _parse(name: str, lines: list[tuple[int, str]]) -> Iterator[TraceRequest]:
    """Parse the lines by the format that the first line indicates."""
    if not lines:
        return
    header = lines[0][1].strip()
    if header.startswith("{"):
        read, lines = _from_mooncake, lines
    elif header in _FROM_CSV:
        read, lines = _FROM_CSV[header], lines[1:]
    else:
        known = " | ".join([*_FROM_CSV, '{"timestamp": …}'])
        raise ValueError(f"{name} starts with {header[:60]!r}, no known format: its first line must be {known}.")
    for number, line in lines:
        try:
            yield _plausible(read(line))
        except (ValueError, KeyError, TypeError) as error:
            text = line.strip()[:60]
            raise ValueError(f"{name}, line {number}: {text!r} can't be read ({error}): mend or drop it.") from error


def _plausible(request: TraceRequest) -> TraceRequest:
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ValueError("a length below 1 token")
    if not math.isfinite(request.arrival):
        raise ValueError("an arrival that is no time")
    return request


def _fields(line: str) -> list[str]:
    fields = next(csv.reader([line]))
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3")
    return fields


def _from_ours(line: str) -> TraceRequest:
    arrival, prompt_tokens, output_tokens = _fields(line)
    return TraceRequest(float(arrival), int(prompt_tokens), int(output_tokens))


def _from_azure(line: str) -> TraceRequest:
    timestamp, prompt_tokens, output_tokens = _fields(line)
    # fromisoformat on Python 3.10 rejects seven decimal places.
    whole, _, fraction = timestamp.partition(".")
    seconds = (datetime.fromisoformat(whole) - datetime(2023, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
    return TraceRequest(seconds, int(prompt_tokens), int(output_tokens))


def _from_mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    arrival, hashes = row["timestamp"] / 1000, tuple(row["hash_ids"])
    return TraceRequest(arrival, int(row["input_length"]), int(row["output_length"]), hashes)


_FROM_CSV = {
    "arrival_s,prompt_tokens,output_tokens": _from_ours,
    "TIMESTAMP,ContextTokens,GeneratedTokens": _from_azure,
}
