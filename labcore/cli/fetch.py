"""`labcore fetch`: have the default model in the cache, so that later runs need no network."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `labcore fetch`."""
    parser = subparsers.add_parser("fetch", help="get the default model now, so that later runs need no network")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch unless it is there. Raises ModelError, one line that says what to do, if it can't be had."""
    from labcore.models import fetch_default

    folder = fetch_default()
    print(f"smollm2-135m is in {folder}")
    return 0
