"""The GPU generations that the kernels are built for, and how many programs of a kernel fit on one multiprocessor.

`programs_per_processor` is built in notebook 03.
"""

from __future__ import annotations

from dataclasses import dataclass

KB = 1024
REGISTERS = 65_536
"""32-bit registers of a multiprocessor, the same on all of them."""


@dataclass(frozen=True)
class Target:
    """A compute capability, as CUDA's programming guide gives it; memory in bytes.

    shared_per_program     most shared memory that one program (thread block) may take
    shared                 shared memory of a multiprocessor, of which each program costs `reserved` more
    warps, programs        most that a multiprocessor holds at a time
    """

    architecture: int
    examples: str
    shared_per_program: int
    shared: int
    reserved: int
    warps: int
    programs: int
    bfloat16: bool = True


TARGETS = (
    Target(75, "T4, RTX 20", 64 * KB, 64 * KB, 0, 32, 16, bfloat16=False),
    Target(80, "A100", 163 * KB, 164 * KB, KB, 64, 32),
    Target(86, "A10, RTX 30", 99 * KB, 100 * KB, KB, 48, 16),
    Target(89, "L4, RTX 40", 99 * KB, 100 * KB, KB, 48, 24),
    Target(90, "H100, H200", 227 * KB, 228 * KB, KB, 64, 32),
    Target(100, "B200", 227 * KB, 228 * KB, KB, 64, 32),
)


def target_of(architecture: int) -> Target:
    """The target of an architecture such as 90. Raises ValueError if the kernels aren't built for it."""
    for target in TARGETS:
        if target.architecture == architecture:
            return target
    raise ValueError(f"architecture is {architecture}; it must be one of {[t.architecture for t in TARGETS]}.")


def programs_per_processor(target: Target, registers: int, warps: int, shared: int) -> int:
    """How many programs a multiprocessor runs at a time, by registers, shared memory, warps and slots.

    registers   per thread; hardware hands them out to a warp in portions of 256
    shared      bytes per program
    """
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // per_warp // warps
    by_shared = target.shared // (shared + target.reserved) if shared else target.programs
    return min(by_registers, by_shared, target.warps // warps, target.programs)
