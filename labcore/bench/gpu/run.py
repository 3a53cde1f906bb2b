"""`labcore bench gpu`: correctness of the kernels, decode bandwidth, prefill and engine throughput on an NVIDIA GPU.

In order of importance: all kernels against torch on the device · bandwidth of a copy · decode as a share of it, and
against SDPA on contiguous K and V · competitors' kernels, where installed · prefill · whole engines with random weights.
Measurements that exceed the budget of minutes (8 by default) are skipped and listed.

Exit status: 0 measured, 1 a kernel is wrong, 3 no GPU, nothing measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from labcore.bench.arguments import minutes
from labcore.files.output_file import output_file, refuse_foreign_file

NO_GPU = 3
GOAL_SHARE = 0.85
"""Share of a copy's bandwidth at the plan's goal point, for an H100 or H200; and never slower than contiguous SDPA."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `labcore bench gpu`."""
    parser = subparsers.add_parser("gpu", help="kernels and engine on an NVIDIA GPU, in at most 8 minutes")
    parser.add_argument("--minutes", type=minutes, default=8.0, help="budget for everything together")
    parser.add_argument("--tune", action="store_true", help="try other tiles at batch 64 × 4096, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out = None if args.out is None else args.out.expanduser()
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise ValueError(f"--out is {args.out}; it must be a file that can be written, in a folder that exists.")
    if reason := why_not():
        print(json.dumps({"benchmark": "gpu", "device": None, "reason": reason}) if args.json else reason)
        return NO_GPU
    from labcore.bench.gpu.measurement_plan import gpu_plan
    from labcore.bench.gpu.timing import Deadline

    if args.out:
        refuse_foreign_file(args.out, is_report, "a report of this benchmark")  # before measuring
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if args.json else print
    report = {"benchmark": "gpu", **device_info(), **measure(gpu_plan(), Deadline(args.minutes), say, args.tune)}
    text = json.dumps(report, indent=1)
    if out is not None:
        with output_file(out, is_report, "a report of this benchmark") as file:
            file.write(text + "\n")
    if args.json:
        print(text)
    return 0 if all(check["ok"] for check in report["checks"]) else 1


def is_report(start: str) -> bool:
    """Whether a file that starts with `start` is a report of this benchmark."""
    return start.startswith('{\n "benchmark": "gpu"')


def why_not() -> str:
    """Reason why nothing can be measured on this machine; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU: torch finds no CUDA device here, so nothing was measured — run this on a machine with one."
    from labcore.attention.kernels.triton_mode import INTERPRETED

    if INTERPRETED:
        return "no GPU used: TRITON_INTERPRET is set, which runs kernels on the CPU — unset it and try again."
    return ""


def measure(plan, deadline, say: Callable[[str], None], tune: bool = False) -> dict:
    """Measure a `Plan`; `say` gets each figure as a line of text at once."""
    from labcore.bench.gpu.competitors import competitor_results
    from labcore.bench.gpu.engine_figures import engine_results
    from labcore.bench.gpu.kernel_figures import checks, decode_points, prefill_point, tile_sweep

    report: dict = {"dtype": str(plan.dtype)[6:], "heads": asdict(plan.heads)}

    def collect(name: str, items) -> None:
        report[name] = []
        for item in items:
            report[name].append(asdict(item))
            say(LINES[name](item))

    collect("checks", checks(plan, deadline))
    report["copy_gb_per_s"] = copy = plan.copy_gb_per_s()
    say(f"device copy {copy:,.0f} GB/s, read and written")
    collect("decode", decode_points(plan, copy, deadline))
    report["competitors"] = competitor_results(plan) if deadline.allows("competitors", 30) else {}
    say(f"competitors, decode {plan.goal_point}: {report['competitors']}")
    shapes = [shape for shape in plan.prefills if deadline.allows(f"prefill {shape}", 5)]
    collect("prefill", (prefill_point(plan, *shape) for shape in shapes))
    collect("engine", engine_results(plan, deadline))
    if tune:
        report["tiles"] = sorted(tile_sweep(plan, copy, deadline), key=lambda row: -row.get("share_of_copy", 0))
        say(f"best tiles: {report['tiles'][:5]}")
    report["goals"] = goals(report["decode"], plan.goal_point)
    report["left_out"] = deadline.left_out
    say(f"goals, for an H100 or H200: {report['goals']}\nleft out: {deadline.left_out or 'nothing'}")
    return report


LINES: dict[str, Callable] = {
    "checks": lambda c: f"{'ok   ' if c.ok else 'WRONG'} {c.what:<72} error {c.error:.1e}",
    "decode": lambda p: (
        f"decode {p.batch:>4} × {p.context:>6}  {p.times.median:9.4f} ms  {p.gb_per_s:7,.0f} GB/s  "
        f"{p.share_of_copy:5.0%} of a copy  {p.speed_against_sdpa:5.2f} × SDPA"
    ),
    "prefill": lambda p: (
        f"prefill {p.batch:>3} × {p.length:>6}  {p.times.median:9.4f} ms  {p.tflop_per_s:7,.1f} TFLOP/s  "
        f"{p.speed_against_sdpa:5.2f} × SDPA"
    ),
    "engine": lambda r: f"{r.model}, cuda_graphs={r.cuda_graphs}  {r.tokens_per_second:,.1f} tok/s, rounds {r.rounds}",
}
"""Section of the report → one result as a line of text."""


def goals(decode: list[dict], goal_point: tuple[int, int]) -> dict[str, object]:
    """Decode figures against the goals; None where not measured."""
    at = [point["share_of_copy"] for point in decode if (point["batch"], point["context"]) == goal_point]
    speeds = [point["speed_against_sdpa"] for point in decode]
    return {
        "share_of_copy": at[0] if at else None,
        "share_of_copy_met": at[0] >= GOAL_SHARE if at else None,
        "slowest_against_sdpa": min(speeds, default=None),
        "never_below_sdpa": min(speeds) >= 1 if speeds else None,
    }


def device_info() -> dict[str, object]:
    """Device and versions, for the report."""
    import torch
    import transformers
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        },
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
