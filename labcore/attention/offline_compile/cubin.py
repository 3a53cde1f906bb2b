"""From a launch to machine code, with no GPU: build it for a target, and read what the code is made of.

Triton's package brings the assembler and the disassembler along. This needs a process in which kernels are compiled,
not interpreted; `labcore.attention.offline_compile.compile_gate` starts one.
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
"""Triton's names of the element types."""

TENSOR_CORE = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"
"""PTX of a product on tensor cores: by one warp, by four from shared memory (sm_90), into tensor memory (sm_100)."""
ASYNC_COPY = r"\bcp\.async\.c[ag]\b"
"""PTX of a copy from global to shared memory that nobody waits for, and that passes through no register (sm_80 on)."""
MULTIPLY_ADD = r"\bfma\.rn\.f32x?2?\b"
"""PTX of a multiply-add, of one pair of numbers or of two (sm_100): what a product without tensor cores is made of."""


@dataclass(frozen=True)
class MachineCode:
    """What a kernel takes and is made of.

    registers   per thread
    stack       bytes per thread in slow local memory: where registers that there was no room for are spilled to
    shared      bytes of shared memory per program
    tensor_core, async_copy, multiply_add      how many instructions of a kind
    """

    registers: int
    stack: int
    shared: int
    tensor_core: int
    async_copy: int
    multiply_add: int


def build(launch: Launch, architecture: int) -> tuple[MachineCode, bytes]:
    """Compile a launch for sm_`architecture`: its figures and the cubin, the binary that a GPU would load.

    Raises RuntimeError in an interpreting process.
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
    """What NVIDIA's cuobjdump, which comes with Triton, says of a cubin: "-res-usage", or "-sass" to disassemble it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout


def ast_source(launch: Launch) -> triton.compiler.ASTSource:
    """What Triton's launcher would make of these arguments: types, compile-time constants, divisibility by 16."""
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
    """A value with its path, or each member of a tuple with its own."""
    if not isinstance(value, tuple):
        return [(path, value)]
    return [((*path, j), member) for j, member in enumerate(value)]


def specialization(value: object, plain: bool) -> tuple[str, bool, bool]:
    """Triton's type of an argument, whether it is compiled in, and whether it is known to be divisible by 16."""
    if value is None:
        return "constexpr", True, False
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}", False, True
    if isinstance(value, float):
        return "fp32", False, False
    if value == 1 and not plain:
        return "constexpr", True, False
    return "i32" if -(2**31) <= value < 2**31 else "i64", False, value % 16 == 0 and not plain
