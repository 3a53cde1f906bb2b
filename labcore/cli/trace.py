"""`labcore trace`: print a flight record, or export it as one HTML page."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from labcore.recorder import Recording

PICTURES = ("block_map", "block_tables", "timeline", "memory", "queues")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore trace`."""
    parser = subparsers.add_parser("trace", help="look at a flight record, or make an HTML page of it")
    parser.add_argument("file", help="a flight record, saved with llm.engine.recorder.save(FILE)")
    parser.add_argument("--html", metavar="OUT", help="write one page with all pictures, which needs no network")
    parser.add_argument("--title", help="title of the page (default: the file's name)")
    parser.add_argument("--step", type=int, help="tell about this step (default: the last one)")
    parser.add_argument(
        "--picture", choices=PICTURES, help="what to tell (default: timeline, or block_map when --step is given)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable: the run, and the state at --step")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a record or write its page. Raises ValueError, in one line, for an invalid file or step."""
    arguments.file = Path(arguments.file).expanduser()
    arguments.html = None if arguments.html is None else Path(arguments.html).expanduser()
    recording = Recording.load(arguments.file)
    if not recording.steps:
        raise ValueError(f"{arguments.file} holds no step — record a run with LLM(…, record=True) and save it.")
    if arguments.html is not None and arguments.html.exists() and arguments.html.samefile(arguments.file):
        raise ValueError(f"--html is {arguments.html}, the record itself — name another file.")
    try:
        if arguments.step is not None:
            recording.at(arguments.step)  # raises ValueError for an unknown step, also with --html
        tell(recording, arguments)
    except (LookupError, TypeError, AttributeError) as error:  # valid format, contradictory steps
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{arguments.file} contradicts itself ({reason}) — record the run again.") from error
    return 0


def tell(recording: Recording, arguments: argparse.Namespace) -> None:
    """Print or export what the options ask for."""
    if arguments.html is not None:
        from labcore.viz.html_report import write_html_report

        title = arguments.title or arguments.file.name
        write_html_report(recording, arguments.html, title.encode("utf-8", "replace").decode())
        told = {"html": str(arguments.html), "bytes": arguments.html.stat().st_size}
        print(json.dumps(told) if arguments.json else f"{told['html']}: {told['bytes'] / 1e6:.1f} MB")
    elif arguments.json:
        state = recording.at(recording.steps[-1] if arguments.step is None else arguments.step).as_dict()
        print(json.dumps(summary(recording) | {"state": state}))
    else:
        from labcore.viz.text_view import text_view

        told = summary(recording)
        picture = arguments.picture or ("timeline" if arguments.step is None else "block_map")
        described = text_view(recording, arguments.step, picture)
        pool = f"{recording.num_blocks} blocks of {recording.block_size}"
        print(f"{told['steps']} steps, {told['requests']} requests, {pool}")
        print(", ".join(f"{count} {kind}" for kind, count in told["events"].items()))
        print(described)


def summary(recording: Recording) -> dict[str, Any]:
    """Sizes and counts of a run."""
    return {
        "steps": len(recording.steps),
        "first_step": recording.steps[0],
        "last_step": recording.steps[-1],
        "requests": len(recording.request_ids()),
        "num_blocks": recording.num_blocks,
        "block_size": recording.block_size,
        "events": dict(Counter(event.kind for event in recording.events())),
    }
