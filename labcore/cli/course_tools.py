"""`labcore course …`: tools for notebook authors. run | check-promotion | rules | claims."""

from __future__ import annotations

import argparse
from pathlib import Path

from labcore.course.author.notebooks import run_notebook
from labcore.course.author.promotion import compare
from labcore.course.author.rules import rules_broken, strictly_compared_share
from labcore.course.curriculum import notebook_files
from labcore.course.learner.claims import ledger_table
from labcore.course.project import project_folder


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore course`."""
    parser = subparsers.add_parser("course", help="for authors: run, check-promotion, rules, claims")
    actions = parser.add_subparsers(metavar="action", required=True)
    runner = actions.add_parser("run", help="execute notebooks in place, each in a fresh kernel, and tidy them up")
    runner.set_defaults(run=run)
    promotion = actions.add_parser(
        "check-promotion", aliases=["promote"], help="compare the notebooks' code with the package"
    )
    promotion.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # of the old spelling: promote --check
    promotion.set_defaults(run=check_promotion)
    rules = actions.add_parser("rules", help="say what in a notebook breaks the course's rules")
    rules.set_defaults(run=check_rules)
    for action in (runner, rules):
        action.add_argument("numbers", nargs="*", metavar="NN", help="which notebooks (default: all)")
    for action in (runner, promotion, rules):
        action.add_argument("--notebooks", type=Path, help="their folder (default: the course's notebooks/)")
    claims = actions.add_parser("claims", help="print the claims ledger")
    claims.add_argument("ids", nargs="*", metavar="ID", help="which claims (default: all)")
    claims.set_defaults(run=show_claims)


def run(arguments: argparse.Namespace) -> int:
    for path in chosen(arguments):
        print(f"{path.name:36}", end="", flush=True)
        print(f"{run_notebook(path):6.1f} s", flush=True)
    return 0


def check_promotion(arguments: argparse.Namespace) -> int:
    """Print owners and differences. Exit status 1 if there is a difference."""
    report = compare(folder(arguments))
    print(report)
    return 1 if report.problems else 0


def check_rules(arguments: argparse.Namespace) -> int:
    """Print violations of the rules. Exit status 1 if there is one."""
    status = 0
    for path in chosen(arguments):
        broken = rules_broken(path)
        status = 1 if broken else status
        print(f"{path.name:36}{'keeps every rule' if not broken else ''}")
        print("".join(f"  {problem}\n" for problem in broken), end="")
    share = strictly_compared_share(folder(arguments))
    print(f"{share:.0%} of the code cells have their output compared in full")
    return status


def show_claims(arguments: argparse.Namespace) -> int:
    print(ledger_table(*arguments.ids) or "the ledger is empty")
    return 0


def folder(arguments: argparse.Namespace) -> Path:
    """The folder that was named, or the course's notebooks/."""
    return arguments.notebooks.expanduser() if arguments.notebooks else project_folder() / "notebooks"


def chosen(arguments: argparse.Namespace) -> list[Path]:
    """The notebooks with the given numbers, or all. Raises ValueError for an unknown number."""
    files = notebook_files(folder(arguments))
    numbers = [number.zfill(2) for number in arguments.numbers]
    unknown = [number for number in numbers if number not in {path.stem[:2] for path in files}]
    if unknown or not files:
        raise ValueError(
            f"there is no notebook {', '.join(unknown)}; there are "
            f"{', '.join(path.stem[:2] for path in files) or 'none at all'}."
        )
    return [path for path in files if not numbers or path.stem[:2] in numbers]
