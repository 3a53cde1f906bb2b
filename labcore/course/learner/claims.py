"""The claims ledger: public claims about paged attention, and what the course found.

One file, `data/claims.json`; a claim may have several entries, one for each figure:

    {"format": 1, "claims": [
      {"id": "reserve",                         as in the notebooks' closing sections
       "claim": "reserving 2048 slots for a 200-token request wastes over 85 %",    as heard
       "verdict": "holds",                      one of VERDICTS
       "figure": 90.2, "unit": "% of the reserved slots",   a number, or a short text where there is none
       "how": "computed",                       measured (a run of ours) | computed (arithmetic, a simulation) | quoted
       "source": "2048 - 200 slots of 2048",    what was measured, on what; or who is quoted
       "notebook": "01",                        where the reader sees it happen
       "command": ""}                           what prints it again, outside the notebook; "" if the notebook does
    ]}

The verdicts:

    holds           our figure agrees with the claim
    holds in part   it agrees under conditions that the claim doesn't name
    exaggerated     the direction is right, the size is not
    depends         it agrees for some models, lengths or machines, and not for others
    mislabelled     the figure is right, and is that of another quantity
    unsupported     no circumstances are named, or the quantity claimed can't be had from what is offered as evidence
    wrong           our figure contradicts it

In a notebook: `ledger("reserve", "waste-old")` prints the entries; `claim("reserve").figure` is there to be asserted
against.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from labcore.course.project import project_folder

FORMAT = 1
VERDICTS = ("holds", "holds in part", "exaggerated", "depends", "mislabelled", "unsupported", "wrong")
HOW = ("measured", "computed", "quoted")


class BrokenLedger(ValueError):
    """data/claims.json is invalid; one line for each problem."""


@dataclass(frozen=True)
class Claim:
    """One claim with one of our figures. Fields: see the module."""

    id: str
    claim: str
    verdict: str
    figure: float | str
    unit: str
    how: str
    source: str
    notebook: str
    command: str = ""

    @property
    def found(self) -> str:
        """Figure and unit as they are shown: "90.2 % of the reserved slots"."""
        figure = f"{self.figure:,}" if isinstance(self.figure, (int, float)) else self.figure
        return f"{figure} {self.unit}".strip()


def load_claims(path: Path | None = None) -> list[Claim]:
    """All entries of the ledger, in file order. Raises BrokenLedger, or FileNotFoundError if there is no ledger."""
    path = path or project_folder() / "data" / "claims.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["claims"]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenLedger(f"{path.name}: not a ledger ({error}) — restore it from git.") from error
    problems = (
        verify(entries) if content.get("format") == FORMAT else [f"format is {content.get('format')!r}, not {FORMAT}"]
    )
    if problems:
        raise BrokenLedger("\n".join(f"{path.name}: {problem}" for problem in problems))
    return [Claim(**entry) for entry in entries]


def verify(entries: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the entries of a ledger, one line each."""
    problems, seen = [], set()
    names = {f.name for f in fields(Claim)}
    for place, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            problems.append(f"entry {place}: is {entry!r}, not an object with fields")
            continue
        who = f"entry {place} ({entry.get('id')!r})"
        if set(entry) - {"command"} != names - {"command"}:
            odd = sorted((set(entry) ^ names) - {"command"})
            problems.append(f"{who}: fields missing or unknown: {', '.join(odd)}")
            continue
        problems += [
            f"{who}: {name} must be a text" for name in names - {"figure"} if not isinstance(entry.get(name, ""), str)
        ]
        problems += [f"{who}: {name} must not be empty" for name in ("claim", "source") if not entry[name]]
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(entry["id"])):
            problems.append(f"{who}: id must be small letters, digits and hyphens")
        if (
            isinstance(entry["figure"], bool)
            or not isinstance(entry["figure"], (int, float, str))
            or entry["figure"] == ""
        ):
            problems.append(f"{who}: figure must be a number or a short text")
        if entry["verdict"] not in VERDICTS:
            problems.append(f"{who}: verdict is {entry['verdict']!r}; it must be one of {', '.join(VERDICTS)}")
        if entry["how"] not in HOW:
            problems.append(f"{who}: how is {entry['how']!r}; it must be one of {', '.join(HOW)}")
        if not re.fullmatch(r"\d\d", str(entry["notebook"])):
            problems.append(f"{who}: notebook is {entry['notebook']!r}; it must be a number such as '01'")
        key = (entry["id"], entry["notebook"], entry["how"], entry["unit"], entry["source"])
        if key in seen:
            problems.append(f"{who}: stands in the ledger twice")
        seen.add(key)
    return problems


def claim(claim_id: str, how: str | None = None) -> Claim:
    """The first entry for a claim, or the first that was got in a certain way ("measured"). Raises KeyError."""
    for entry in load_claims():
        if entry.id == claim_id and how in (None, entry.how):
            return entry
    raise KeyError(f"the ledger has no {how or ''} entry for {claim_id!r} — see data/claims.json.".replace("  ", " "))


def ledger(*claim_ids: str) -> None:
    """Print what the ledger says of these claims (all, if none is named)."""
    print(ledger_table(*claim_ids))


def ledger_table(*claim_ids: str, claims: list[Claim] | None = None) -> str:
    """The claims as a text table: what was heard and the verdict, and under it each figure and how it was got."""
    claims = load_claims() if claims is None else claims
    blocks = []
    for claim_id in claim_ids or tuple(dict.fromkeys(entry.id for entry in claims)):
        entries = [entry for entry in claims if entry.id == claim_id]
        if not entries:
            blocks.append(f"{claim_id:12} is not in the ledger")
            continue
        heard = textwrap.wrap(f"“{entries[0].claim}”", 100)
        lines = [f"{claim_id:12} {heard[0]}", *(f"{'':12} {line}" for line in heard[1:])]
        lines[-1] += f"   {entries[0].verdict.upper()}"
        for entry in entries:
            lines += textwrap.wrap(
                f"{entry.how:9} {entry.found} — {entry.source} (notebook {entry.notebook})",
                100,
                initial_indent=" " * 13,
                subsequent_indent=" " * 23,
            )
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
