"""The compile gate: every kernel becomes machine code for six GPU generations, spills nothing and fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")

from labcore.attention.offline_compile.compile_gate import (  # noqa: E402
    DTYPES,
    HEAD_DIMS,
    KERNELS,
    all_cases,
    build_all,
    case_of,
    launch_of,
    main,
    shortcomings,
    table,
    to_json,
)
from labcore.attention.offline_compile.gpus import TARGETS, programs_per_processor, target_of  # noqa: E402

STORED = Path(__file__).parents[2] / "data" / "results" / "compile_gate.json"


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return build_all(all_cases())


def test_the_cases_are_every_kernel_dtype_head_size_and_target():
    plain = {(c.kernel, c.dtype, c.head_dim, c.architecture) for c in all_cases() if not c.extras}
    targets = [(dtype, t.architecture) for dtype in DTYPES for t in TARGETS if dtype != "bfloat16" or t.bfloat16]
    assert plain == {(k, dtype, d, a) for k in KERNELS for d in HEAD_DIMS for dtype, a in targets}
    assert {t.architecture for t in TARGETS} == {75, 80, 86, 89, 90, 100}


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target_spills_nothing_and_fits(rows):
    print("\n" + table(rows))
    assert [case_of(row) for row in rows] == all_cases()
    assert {str(case_of(row)): found for row in rows if (found := shortcomings(row))} == {}


@pytest.mark.slow
def test_sixteen_bit_products_run_on_tensor_cores_from_sm_80_and_loads_are_asynchronous(rows):
    for row in rows:
        if row["kernel"] in ("paged_decode", "paged_prefill"):
            assert (row["tensor_core"] > 0) == (row["architecture"] >= 80 and row["dtype"] != "float32"), case_of(row)
            assert (row["async_copy"] > 0) == (row["architecture"] >= 80), case_of(row)
            assert row["tensor_core"] or row["multiply_add"] > 100, case_of(row)


@pytest.mark.slow
def test_the_stored_figures_are_those_of_today(rows):
    stored = json.loads(STORED.read_text())
    if stored["triton"] != triton.__version__:
        pytest.skip(f"the figures were taken with Triton {stored['triton']}, this is {triton.__version__}")
    assert to_json(rows) == STORED.read_text(), f"python -m labcore.attention.offline_compile --json {STORED.name} renews them"


def test_a_row_that_spills_or_does_not_fit_is_named():
    good = json.loads(STORED.read_text())["rows"][0]
    assert shortcomings(good) == []
    assert re.search("spills 48 bytes", shortcomings({**good, "stack": 48})[0])
    assert re.search("shared memory", shortcomings({**good, "architecture": 86, "shared": 120_000})[0])
    assert re.search("doesn't fit", shortcomings({**good, "programs": 0})[0])


def test_programs_per_processor_are_bound_by_registers_shared_memory_warps_and_slots():
    hopper, turing = target_of(90), target_of(75)
    assert programs_per_processor(hopper, registers=255, warps=4, shared=0) == 2  # 256 · 32 · 4 = 32,768 registers
    assert programs_per_processor(hopper, registers=64, warps=4, shared=72_192) == 3
    assert programs_per_processor(turing, registers=16, warps=8, shared=0) == 4
    assert programs_per_processor(hopper, registers=16, warps=1, shared=0) == 32


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="architecture is 70"):
        target_of(70)


def test_a_failing_compiler_process_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="compiler process failed"):
        build_all(all_cases()[:2])


@pytest.mark.slow
def test_the_command_prints_the_table_of_what_was_asked_for(tmp_path, capsys):
    out = tmp_path / "gate.json"
    assert main(["--kernel", "store_kv", "--dtype", "float16", "--head-dim", "64", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6 kernels built, 0 shortcomings" in printed and "store_kv" in printed
    assert [row["architecture"] for row in json.loads(out.read_text())["rows"]] == [75, 80, 86, 89, 90, 100]


@pytest.mark.slow
def test_the_machine_code_of_a_kernel_can_be_read(capsys):
    assert main(["--kernel", "store_kv", "--dtype", "float16", "--head-dim", "128", "--target", "80", "--sass"]) == 0
    assert "STG.E.128" in capsys.readouterr().out, "16 bytes a thread and store"


def test_the_gate_builds_what_the_launcher_would_build():
    """Types, constants and divisibility of every argument, as Triton's own launcher works them out."""
    code = """
from labcore.attention.offline_compile.compile_gate import all_cases, launch_of
from labcore.attention.offline_compile.cubin import ast_source
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
backend = make_backend(GPUTarget("cuda", 90, 32))
checked = 0
for case in all_cases():
    if case.architecture == 90 and case.dtype == "float16":
        launch = launch_of(case)
        bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
        bound, specialized, options = bind(**launch.args)
        _, signature, constants, attributes = launch.kernel._pack_args(backend, {}, bound, specialized, options)
        source = ast_source(launch)
        assert source.signature == signature, (source.signature, signature)
        assert source.constants == constants, (source.constants, constants)
        assert source.attrs == {path: found for path, found in attributes.items() if found}, attributes
        checked += 1
print(checked)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "28", done.stderr


def test_launches_can_be_looked_at_where_kernels_are_interpreted():
    launch = launch_of(next(case for case in all_cases() if case.kernel == "paged_decode"))
    assert launch.grid == (7, 8, 32) and launch.args["GROUP"] == 4


CELLS = {
    "helper": "@triton.jit\ndef scaled(x):\n    return x * FACTOR\n",
    "kernel": "@triton.jit\ndef scale(p):\n    tl.store(p, scaled(tl.load(p)))\n",
}
RUN = """
import linecache, sys
from labcore.attention.kernels.triton_mode import INTERPRETED, tl, triton

def run_cell(name, source):  # as a notebook does: its lines can be looked up, its names are everybody's
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), cells)

def outcome():
    if not INTERPRETED:
        return cells["scale"].cache_key
    import torch
    x = torch.ones(1)
    cells["scale"][(1,)](x)
    return x.item()

cells, told = {"triton": triton, "tl": tl}, []
for count, factor in enumerate((2, 3)):
    run_cell(f"helper {count}", HELPER.replace("FACTOR", str(factor)))
    run_cell(f"kernel {count}", KERNEL)
    told.append(outcome())
print(told if INTERPRETED else told[0] != told[1])
"""


@pytest.mark.parametrize("interpret, expected", [("1", "[2.0, 3.0]"), ("0", "True")])
def test_a_helper_that_was_changed_takes_effect_when_its_cell_and_the_kernels_are_run_again(interpret, expected):
    """Case: the old code ran on until a cache was deleted. Compiled kernels are looked up by a key that must change."""
    code = f"HELPER, KERNEL = {CELLS['helper']!r}, {CELLS['kernel']!r}\n{RUN}"
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == expected, done.stderr
