"""The compile gate: compile every kernel for six GPU generations without a GPU, and check their resource limits.

    python -m labcore.attention.offline_compile                      all kernels, as a table
    python -m labcore.attention.offline_compile --json FILE          and the figures to a file
    python -m labcore.attention.offline_compile --kernel paged_decode --dtype float16 --head-dim 128 --target 90 --sass

The interpreter tests a kernel's results, but not whether it compiles. The gate compiles each kernel with the settings of
`kernels/tile_sizes.py` for each dtype and target, and reads registers, spills, shared memory and key instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from labcore.attention.backend import AttentionMetadata
from labcore.attention.kernels.launch import (
    KERNELS,
    Launch,
    ScoreOptions,
    copy_launch,
    decode_launches,
    prefill_launch,
    store_launch,
)
from labcore.attention.kernels.tile_sizes import decode_tile, prefill_tile
from labcore.attention.kernels.triton_mode import triton
from labcore.attention.offline_compile.cubin import build, cuobjdump
from labcore.attention.offline_compile.gpus import TARGETS, programs_per_processor, target_of
from labcore.files.output_file import output_file, refuse_foreign_file

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 80, 128, 256)

GROUP, NUM_KV_HEADS, BLOCK_SIZE, SPLITS = 4, 8, 16, 32
"""Heads of Llama-3.1-8B, vLLM's block size, and the splits of one long sequence."""


@dataclass(frozen=True, order=True)
class Case:
    """A kernel variant to compile. extras: with a sliding window, a softcap and sinks."""

    kernel: str
    dtype: str
    head_dim: int
    architecture: int
    extras: bool = False


def all_cases() -> list[Case]:
    """Every kernel × dtype × head size × target, bfloat16 if the target supports it; the attention kernels also with extras."""
    cases = [
        Case(kernel, dtype, head_dim, target.architecture)
        for kernel, dtype, head_dim, target in product(KERNELS, DTYPES, HEAD_DIMS, TARGETS)
        if dtype != "bfloat16" or target.bfloat16
    ]
    for kernel, head_dim, target in product(("paged_decode", "paged_prefill"), HEAD_DIMS, TARGETS):
        cases.append(Case(kernel, "float16", head_dim, target.architecture, extras=True))
    return sorted(cases)


def launch_of(case: Case) -> Launch:
    """The launch that the backend would make, on meta tensors."""
    dtype = getattr(torch, case.dtype)
    num_tokens, num_seqs, num_heads = 33, 7, GROUP * NUM_KV_HEADS

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def queries(rows: int, heads: int) -> torch.Tensor:  # strides as transformers passes them
        return tensor(heads, rows, case.head_dim).transpose(0, 1)

    pool = tensor(100, BLOCK_SIZE, NUM_KV_HEADS, case.head_dim)
    if case.kernel == "copy_blocks":
        return copy_launch([pool, pool], tensor(3, 2, dtype=torch.int64))
    if case.kernel == "store_kv":
        k = queries(num_tokens, NUM_KV_HEADS)
        return store_launch(k, k, pool, pool, tensor(num_tokens, dtype=torch.int64))
    metadata = AttentionMetadata(
        slot_mapping=tensor(num_tokens, dtype=torch.int64),
        block_tables=tensor(num_seqs, 33, dtype=torch.int32),
        seq_lens=tensor(num_seqs, dtype=torch.int32),
        cu_seqlens=tensor(num_seqs + 1, dtype=torch.int32),
        block_size=BLOCK_SIZE,
        seq_lens_list=[],
        query_lens_list=[],
    )
    score_options = ScoreOptions(case.head_dim**-0.5)
    if case.extras:
        score_options = ScoreOptions(case.head_dim**-0.5, sliding_window=1024, softcap=50.0, sinks=tensor(num_heads))
    if case.kernel == "paged_prefill":
        q, out = queries(num_tokens, num_heads), tensor(num_tokens, num_heads, case.head_dim)
        tile = prefill_tile(case.architecture, case.head_dim, dtype)
        return prefill_launch(out, q, pool, pool, metadata, score_options, tile)
    q, out = queries(num_seqs, num_heads), tensor(num_seqs, num_heads, case.head_dim)
    tile = decode_tile(case.architecture, case.head_dim, dtype, GROUP)
    decode, reduce = decode_launches(out, q, pool, pool, metadata, score_options, tile, SPLITS)
    return decode if case.kernel == "paged_decode" else reduce


def figures_of(case: Case) -> dict[str, object]:
    """Compile a case: its tile, the resources of its machine code, and programs per multiprocessor (occupancy)."""
    launch = launch_of(case)
    code, _ = build(launch, case.architecture)
    programs = programs_per_processor(target_of(case.architecture), code.registers, launch.num_warps, code.shared)
    tile = {name.lower(): launch.args[name] for name in ("ROWS", "TILE") if name in launch.args}
    settings = {**tile, "warps": launch.num_warps, "stages": launch.num_stages}
    return {**asdict(case), **settings, **asdict(code), "programs": programs}


def compiler_process(*arguments: str, request: str = "") -> str:
    """The output of `python -m labcore.attention.offline_compile` in a subprocess in compiled mode.

    Raises RuntimeError if it fails.
    """
    command = [sys.executable, "-m", "labcore.attention.offline_compile", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the compiler process failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def disassemble(case: Case) -> str:
    """The machine code of a case as text (SASS), one instruction per line."""
    return compiler_process("--disassemble", request=json.dumps([asdict(case)]))


def build_all(cases: Sequence[Case], workers: int = 2) -> list[dict[str, object]]:
    """Figures of all cases, in order, compiled by `workers` subprocesses."""

    def work(part: Sequence[Case]) -> list[dict[str, object]]:
        return json.loads(compiler_process("--worker", request=json.dumps([asdict(case) for case in part])))

    with ThreadPoolExecutor(workers) as pool:
        rows = [row for part in pool.map(work, [cases[i::workers] for i in range(workers)]) for row in part]
    order = {case: i for i, case in enumerate(cases)}
    return sorted(rows, key=lambda row: order[case_of(row)])


def case_of(row: dict) -> Case:
    """The case of a row of figures."""
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def shortcomings(row: dict) -> list[str]:
    """Violations of the target's limits, one sentence each; empty for a valid row."""
    limit = target_of(row["architecture"]).shared_per_program
    found = []
    if row["shared"] > limit:
        found.append(f"takes {row['shared']:,} bytes of shared memory; a program gets {limit:,}")
    if row["stack"]:
        found.append(f"spills {row['stack']} bytes of registers a thread")
    if row["programs"] < 1:
        found.append(f"doesn't fit: {row['registers']} registers × {row['warps']} warps")
    return found


COLUMNS = {
    "kernel": "kernel",
    "dtype": "dtype",
    "head_dim": "D",
    "architecture": "sm",
    "extras": "extras",
    "rows": "rows",
    "tile": "keys",
    "warps": "warps",
    "registers": "registers",
    "stack": "spilled",
    "shared": "shared",
    "tensor_core": "MMA",
    "async_copy": "cp.async",
    "programs": "programs/SM",
}


def table(rows: Sequence[dict]) -> str:
    """The figures as an aligned text table."""
    cells = [list(COLUMNS.values())]
    cells += [["·" if row.get(name) in (None, False) else str(row[name]) for name in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def to_json(rows: Sequence[dict]) -> str:
    """JSON with one row per line, for readable diffs."""
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"triton": "{triton.__version__}", "rows": [\n{body}\n]}}\n'


def is_figures(start: str) -> bool:
    """Whether a file that begins with `start` was written from `to_json`."""
    return start.startswith('{"triton": ')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m labcore.attention.offline_compile", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=KERNELS)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS)
    parser.add_argument("--target", type=int, choices=[target.architecture for target in TARGETS])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures, too")
    parser.add_argument("--sass", action="store_true", help="print the disassembly of the first kernel chosen")
    parser.add_argument("--workers", type=int, default=2, help="compiler processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disassemble", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker or options.disassemble:
        asked = [Case(**case) for case in json.load(sys.stdin)]
        if options.disassemble:
            print(cuobjdump(build(launch_of(asked[0]), asked[0].architecture)[1], "-sass"))
        else:
            json.dump([figures_of(case) for case in asked], sys.stdout)
        return 0
    if options.json:
        refuse_foreign_file(options.json, is_figures, "a table of these figures")  # fail before compiling
    wanted = {"kernel": options.kernel, "dtype": options.dtype, "head_dim": options.head_dim}
    wanted["architecture"] = options.target
    cases = [case for case in all_cases() if all(v in (None, getattr(case, name)) for name, v in wanted.items())]
    if options.sass:
        print(disassemble(cases[0]))
        return 0
    rows = build_all(cases, options.workers)
    print(table(rows))
    if options.json:
        with output_file(options.json, is_figures, "a table of these figures") as file:
            file.write(to_json(rows))
    faults = [f"{case_of(row)}: {fault}" for row in rows for fault in shortcomings(row)]
    print(f"\n{len(rows)} kernels built, {len(faults)} shortcomings", *faults, sep="\n")
    return 1 if faults else 0

