"""Cost of a block: time of one allocate/free pair, in pools from a thousand to a million blocks.

`bulk` allocates and frees 64 blocks per call, as a prompt does (cost of the loop); `single` one block per call, as a
decode step at a block boundary does (cost of the call). Each in a pool whose free list is in order, and in one whose free
list is shuffled, as after long use: there the time is dominated by CPU cache misses.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from labcore.bench.arguments import at_least_one
from labcore.bench.run_info import run_info
from labcore.kvcache.blocks import BlockPool

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BULK = 64
"""Blocks of a 1,024-token prompt, 16 tokens each."""
GOAL_US, GOAL_RATIO = 1.5, 1.3
SEED = 0


@dataclass(frozen=True)
class AllocationCost:
    """Microseconds per block of allocate and free: best of the rounds."""

    num_blocks: int
    bulk: float
    single: float
    bulk_shuffled: float
    single_shuffled: float


def measure(sizes: Sequence[int] = SIZES, rounds: int = 7, pairs: int = 100_000) -> list[AllocationCost]:
    """Time `pairs` pairs per round. Sizes alternate, so that machine drift affects all of them."""
    pools = {n: (BlockPool(n, 16), BlockPool(n, 16, free_order=shuffled(n))) for n in sizes}
    best: dict[tuple[int, int, int], float] = {}
    for _ in range(rounds):
        for n in sizes:
            for kind, pool in enumerate(pools[n]):
                for batch in (BULK, 1):
                    key = (n, kind, batch)
                    best[key] = min(best.get(key, float("inf")), pair_seconds(pool, batch, pairs))
    return [AllocationCost(n, *(best[n, kind, batch] * 1e6 for kind in (0, 1) for batch in (BULK, 1))) for n in sizes]


def pair_seconds(pool: BlockPool, batch: int, pairs: int) -> float:
    """Seconds per block of allocating and freeing `batch` blocks at a time, `pairs` blocks in all."""
    calls = max(1, pairs // batch)
    start = time.perf_counter()
    for _ in range(calls):
        pool.free(pool.allocate(batch))
    return (time.perf_counter() - start) / (calls * batch)


def shuffled(num_blocks: int) -> list[int]:
    """A random free order, as after long use."""
    order = list(range(num_blocks))
    random.Random(SEED).shuffle(order)
    return order


def growth(costs: Sequence[AllocationCost], column: str) -> float:
    """Cost in the largest pool divided by cost in the smallest."""
    return getattr(costs[-1], column) / getattr(costs[0], column)


def table(costs: Sequence[AllocationCost]) -> str:
    """The costs as text, one line per pool size."""
    names = [f.name for f in fields(AllocationCost)]
    rows = [[f"{cost.num_blocks:,}", *(f"{getattr(cost, name):.3f}" for name in names[1:])] for cost in costs]
    head = ["blocks", *(name.replace("_", ", ") for name in names[1:])]
    lines = ["  ".join(f"{piece:>16}" for piece in row) for row in [head, *rows]]
    return "\n".join([f"microseconds per block, allocate and free; bulk is {BULK} at a time", *lines])


def report(costs: Sequence[AllocationCost]) -> dict:
    """The figures as JSON, with machine, versions and goals."""
    return {
        **run_info("blocks"),
        "unit": "microseconds per allocate/free pair of one block, best of the rounds",
        "bulk": BULK,
        "goal": {"bulk_at_most": GOAL_US, "growth_at_most": GOAL_RATIO},
        "growth": {f.name: round(growth(costs, f.name), 2) for f in fields(AllocationCost) if f.name != "num_blocks"},
        "results": [asdict(cost) for cost in costs],
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench blocks`."""
    parser = subparsers.add_parser("blocks", help="time of one allocate/free pair, for pools of 10^3 to 10^6 blocks")
    parser.add_argument("--rounds", type=at_least_one, default=7)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    costs = measure(rounds=args.rounds)
    if args.json:
        print(json.dumps(report(costs), indent=2))
        return 0
    print(table(costs))
    ratio, dearest = growth(costs, "bulk"), max(cost.bulk for cost in costs)
    met = ratio <= GOAL_RATIO and dearest <= GOAL_US
    print(f"in bulk: at most {dearest:.2f} µs (goal {GOAL_US}), largest pool {ratio:.2f} times the smallest", end=" ")
    print(f"(goal {GOAL_RATIO}): {'met' if met else 'missed'}")
    return 0
