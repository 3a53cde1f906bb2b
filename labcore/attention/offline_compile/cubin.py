"""Compile a launch to machine code (cubin) without a GPU, and read its resources and instructions.

Triton's package includes assembler and disassembler. Needs a process in compiled mode;
`labcore.attention.offline_compile.compile_gate` starts one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labcore.attention.kernels.launch import Launch
from labcore.attention.kernels.triton_mode import INTERPRETED, triton

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's type names."""

TENSOR_CORE = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"
"""PTX of a tensor-core product: per warp, per warpgroup (sm_90), into tensor memory (sm_100)."""
ASYNC_COPY = r"\bcp\.async\.c[ag]\b"
"""PTX of an asynchronous copy from global to shared memory (from sm_80)."""
MULTIPLY_ADD = r"\bfma\.rn\.f32x?2?\b"
"""PTX of a float32 fused multiply-add, scalar or packed in pairs (sm_100): a product without tensor cores."""


@dataclass(frozen=True)
class MachineCode:
    """Resources and instruction counts of a compiled kernel.

    registers   per thread
    stack       bytes of local memory per thread: spilled registers
    shared      bytes of shared memory per program
    tensor_core, async_copy, multiply_add      number of PTX instructions
    """

    registers: int
    stack: int
    shared: int
    tensor_core: int
    async_copy: int
    multiply_add: int


def build(launch: Launch, architecture: int) -> tuple[MachineCode, bytes]:
    """Compile a launch for sm_`architecture`: its figures, and the cubin, the GPU's binary.

    Raises RuntimeError in a process in interpreted mode.
    """
    if INTERPRETED:
        raise RuntimeError(
            "kernels are interpreted in this process and can't be compiled here: use "
            "labcore.attention.offline_compile.compile_gate, which starts one that compiles."
        )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    kernel = triton.compile(ast_source(launch), target=target, options=options)
    ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump(cubin, "-res-usage"))
    figures = MachineCode(
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=kernel.metadata.shared,
        tensor_core=len(re.findall(TENSOR_CORE, ptx)),
        async_copy=len(re.findall(ASYNC_COPY, ptx)),
        multiply_add=len(re.findall(MULTIPLY_ADD, ptx)),
    )
    return figures, cubin


def cuobjdump(cubin: bytes, what: str) -> str:
    """Output of NVIDIA's cuobjdump, part of Triton, for a cubin: "-res-usage", or "-sass" for the disassembly."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout


def ast_source(launch: Launch) -> triton.compiler.ASTSource:
    """Specialise a kernel as Triton's launcher would: argument types, constants, divisibility by 16."""
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.args[param.name]
        if param.is_constexpr:
            signature[param.name], constants[i,] = "constexpr", value
            continue
        members = list(flattened(value, (i,)))
        types = []
        for path, member in members:
            kind, is_constant, divisible = specialization(member, param.do_not_specialize)
            types.append(kind)
            if is_constant:
                constants[path] = member
            if divisible:
                attributes[path] = [["tt.divisibility", 16]]
        signature[param.name] = tuple(types) if isinstance(value, tuple) else types[0]
    return triton.compiler.ASTSource(launch.kernel, signature, constants, attributes)


def flattened(value: object, path: tuple[int, ...]) -> Iterable[tuple[tuple[int, ...], object]]:
    """(path, value) of a value, or of each member of a tuple."""
    if not isinstance(value, tuple):
        return [(path, value)]
    return [((*path, j), member) for j, member in enumerate(value)]


def specialization(value: object, plain: bool) -> tuple[str, bool, bool]:
    """Triton's type of an argument, whether it is a constant, and whether it is divisible by 16."""
    if value is None:
        return "constexpr", True, False
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}", False, True
    if isinstance(value, float):
        return "fp32", False, False
    if value == 1 and not plain:
        return "constexpr", True, False
    return "i32" if -(2**31) <= value < 2**31 else "i64", False, value % 16 == 0 and not plain
