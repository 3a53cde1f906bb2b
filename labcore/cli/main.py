"""The command line: `labcore generate "…"`, `labcore doctor`, and so on.

A command is a module with `add_parser(subparsers)`, which sets `run`, a function from parsed arguments to exit status.
Only the requested command's module is imported, so `labcore --help` is fast and `labcore doctor` runs without torch.

Exit status: 0 fine, 1 failed, 2 bad input, 130 interrupted, 141 broken pipe.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from labcore import __version__

Table = Mapping[str, "tuple[str | Table, str]"]

BENCHMARKS: Table = {
    "gpu": ("labcore.bench.gpu.run", "kernels and engine on an NVIDIA GPU, in at most 8 minutes"),
    "engine": ("labcore.bench.throughput", "tokens per second against transformers, on this machine's CPU"),
    "blocks": ("labcore.bench.block_pool", "time of one allocate/free pair, for pools of 10^3 to 10^6 blocks"),
    "scheduler": ("labcore.bench.step_planning", "time of planning a step, 1,000 requests running and up to 100,000 waiting"),
    "recorder": ("labcore.bench.recorder_cost", "flight recorder: share of the engine's time, size of a run's file"),
    "prefix": ("labcore.bench.prefix_reuse", "prefix cache: look-up time, overhead, memory saved by sharing"),
    "chunking": ("labcore.bench.prefill_stalls", "gaps of decoding streams during the prefill of a long prompt, by budget"),
}
COMMANDS: Table = {
    "generate": ("labcore.cli.generate", "continue or answer a prompt"),
    "doctor": ("labcore.doctor.report", "check this machine: what is there, what is missing, what to do"),
    "fetch": ("labcore.cli.fetch", "get the default model now, so that later runs need no network"),
    "bench": (BENCHMARKS, "measure on this machine"),
    "check": ("labcore.cli.check", "which exercises are done, and what comes next"),
    "student": ("labcore.cli.student", "make the student edition of the notebooks"),
    "trace": ("labcore.cli.trace", "look at a flight record, or make an HTML page of it"),
    "course": ("labcore.cli.course_tools", "for authors: run, check-promotion, rules, claims"),
}
"""name: (module, or a table of its own, and help)."""


class Parser(argparse.ArgumentParser):
    """Reports usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"labcore: error: {message} — see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. LABCORE_TRACEBACK=1 shows tracebacks."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal lacks are replaced
    try:
        parsed = make_parser(arguments).parse_args(arguments or ["--help"])
        status = parsed.run(parsed)
        if sys.stdout is not None:  # stdout was closed at start-up
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nlabcore: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 141
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("LABCORE_TRACEBACK"):
            raise
        print(f"labcore: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def make_parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser for these arguments: all commands by name, the requested one with its options."""
    parser = Parser(prog="labcore", description="A language-model inference engine, built notebook by notebook.")
    parser.add_argument("--version", action="version", version=f"labcore {__version__}")
    add_commands(parser, COMMANDS, arguments)
    return parser


def add_commands(parser: argparse.ArgumentParser, table: Table, arguments: list[str]) -> None:
    """Add the commands of `table` to `parser`; only the one that `arguments` name is imported."""
    chosen = next((place for place, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    subparsers = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, (home, help_text) in table.items():
        if arguments[chosen : chosen + 1] != [name]:
            subparsers.add_parser(name, help=help_text)
        elif isinstance(home, str):
            import_module(home).add_parser(subparsers)
        else:
            add_commands(subparsers.add_parser(name, help=help_text), home, arguments[chosen + 1 :])


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, or its type if it has none; for an OSError the file and the reason."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror}"
    return " ".join(message.split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
